"""Results are tensors of their own, or share memory, or are one, just as in eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxkit
from fxkit.lower.training import training_module
from fxkit.passes.pipelines import INFERENCE

Program = Callable[[Tensor], tuple[Tensor, ...]]


def with_views(x: Tensor) -> tuple[Tensor, ...]:
    a = x * 2 + 1
    return a, a.reshape(-1), a.view(2, 12), a.t(), a.t(), a.reshape(4, 6), a[1:3], a


def with_itself(x: Tensor) -> tuple[Tensor, ...]:
    a = x * 2
    return a, a.contiguous(), a.to(torch.float32), a.float(), a.expand(4, 6), a.view_as(a)


def with_copies(x: Tensor) -> tuple[Tensor, ...]:
    a = x.t() * 2
    return a, a.reshape(-1), a.contiguous(), a.clone(), a.clone(), a * 1, x * 2, x * 2


def with_squeezes(x: Tensor) -> tuple[Tensor, ...]:
    a = x * 2
    return a.squeeze(), a, a.unsqueeze(0).squeeze(0), a.transpose(0, 1).transpose(0, 1)


def with_inputs(x: Tensor) -> tuple[Tensor, ...]:
    return x, x.view(4, 6), x.reshape(-1), x + 1, x.contiguous(), x.expand(4, 6)


def with_parts(x: Tensor) -> tuple[Tensor, ...]:
    a = torch.cat([x, x])
    first, second = a.chunk(2)
    return first, a[:4], second, a[4:], a


PROGRAMS = [with_views, with_itself, with_copies, with_squeezes, with_inputs, with_parts]


def relations(results: Any, given: Tensor) -> list[Any]:
    """Return for each two tensors whether they are one, or where they meet in memory."""
    found: list[Any] = []
    for a, b in itertools.combinations([given, *results], 2):
        is_shared = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        found.append("one" if a is b else is_shared and b.data_ptr() - a.data_ptr())
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["no_grad", "grad", "train", "passes", "fast"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_as_many_tensors_as_in_eager(
    program: Program, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_module, "CALL_SECONDS", -1.0)  # every kernel pays
    x = torch.randn(4, 6, requires_grad=way in ("grad", "train"))
    if way == "passes":
        gm = fxkit.symbolic_trace(program)
        compiled: Any = fxkit.PassManager(INFERENCE, args=(x,)).run(gm).graph_module
    else:
        compiled = fxkit.compile(program, train=way == "train", fast=way == "fast")
        compiled(x)
    found, expected = compiled(x), program(x)
    assert relations(found, x) == relations(expected, x)
    assert [t._base is None for t in found] == [t._base is None for t in expected]
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride()
