"""Programs that no graph holds run in Python, with a reason and the line."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fxkit.tracing.captured import Captured

LAYER = nn.Linear(4, 4)


def _copied(x: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(LAYER)(x)


def _of_an_array(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(np.linspace(0, 1, 4)) * x


def _backward(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).requires_grad_()
    (y * y).sum().backward()
    assert y.grad is not None
    return y.grad + 1


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (_copied, "of unknown origin"),
        (_of_an_array, "is given a ndarray"),
        (_backward, "writes gradients into .grad"),
    ],
)
def test_a_program_runs_in_python_with_a_reason(
    program: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    captured = Captured(program)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    for _ in range(3):
        torch.testing.assert_close(captured(x), program(x))
    assert not captured.whole
    assert reason in captured.explain(x) and "test_refusals.py" in captured.explain(x)


def test_a_module_with_a_backward_hook_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_full_backward_hook(lambda module, before, after: None)
    captured = Captured(model)
    captured(torch.ones(2, 4, requires_grad=True))
    told = captured.explain(torch.ones(2, 4, requires_grad=True))
    assert "0 has a backward hook" in told and "remove the hook" in told
    with torch.no_grad():
        captured(torch.ones(2, 4))
        assert captured.explain(torch.ones(2, 4)).startswith("graph 0 of 1 holds")
