"""`torch.cond` and `torch.while_loop` in programs are nodes with graphs for their functions."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fxkit
from fxkit.torch_adapters.late_imports import FOR_CONTROL_OPERATORS
from fxkit.tracing.captured import Captured
from fxkit.tracing.environment import call_watch
from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from tests.tracing.faithful import assert_same

gain = 2.0


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * gain


class Choosing(nn.Module):
    """Calls `torch.cond` with functions that read parameters, attributes and globals."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.factor = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1

        def positive(x: torch.Tensor) -> Any:
            return {"out": self.linear(x) * self.factor, "more": (x.sin(),)}

        def negative(x: torch.Tensor) -> Any:
            return {"out": _scaled(x), "more": (x.cos(),)}

        found = torch.cond(x.sum() > 0, positive, negative, (x,))
        return found["out"] + found["more"][0]


def _targets(captured: Any) -> list[Any]:
    return [node.target for node in captured.nodes if node.op == "call_function"]


def test_cond_is_a_node() -> None:
    global gain
    gain, ours = 2.0, Choosing()
    theirs = copy.deepcopy(ours)
    captured = fxkit.capture(ours, (torch.ones(3),))
    assert torch.ops.higher_order.cond in _targets(captured)
    inputs = (torch.ones(3), torch.full((3,), -3.0))
    for x in inputs:
        assert_same(captured(x), theirs(x), "as captured")
    assert captured.recaptures == 0 and captured.whole and captured.sound
    ours.factor = theirs.factor = 5.0
    assert "factor to be 3.0, got 5.0" in captured.explain(inputs[0])
    for x in inputs:
        assert_same(captured(x), theirs(x), "another factor")
    gain = 7.0
    assert "gain to be 2.0, got 7.0" in captured.explain(inputs[1])
    for x in inputs:
        assert_same(captured(x), theirs(x), "another global")
    assert captured.recaptures == 2


def test_gradients_flow_through_cond() -> None:
    module = Choosing()
    captured = fxkit.capture(module, (torch.ones(3),))
    for x in (torch.ones(3), torch.full((3,), -3.0)):
        ours, theirs = (
            torch.autograd.grad(fn(x).sum(), tuple(module.parameters()), allow_unused=True)
            for fn in (captured, module)
        )
        assert_same(ours, theirs, "gradients")


def test_while_loop_is_a_node() -> None:
    def fn(x: torch.Tensor, count: torch.Tensor) -> Any:
        def goes_on(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return i < count

        def step(i: torch.Tensor, y: torch.Tensor) -> Any:
            return i + 1, y * 2 + x

        return torch.while_loop(goes_on, step, (torch.tensor(0), x))

    captured = fxkit.capture(fn, (torch.ones(3), torch.tensor(3)))
    assert torch.ops.higher_order.while_loop in _targets(captured)
    for count in (0, 1, 5):
        args = (torch.arange(3.0), torch.tensor(count))
        assert_same(captured(*args), fn(*args), f"{count} steps")
    assert captured.recaptures == 0


def test_the_graph_compiles() -> None:
    module = Choosing()
    compiled = fxkit.compile(module)
    with torch.no_grad():
        for x in (torch.ones(3), torch.full((3,), -3.0)):
            torch.testing.assert_close(compiled(x), module(x))


_ALONE = """
import torch, fxkit

def doubled(x):
    return torch.while_loop(lambda y: y.sum() < 99, lambda y: (y * 2,), (x + 1,))[0]

compiled = fxkit.compile(doubled)
with torch.no_grad():
    for x in (torch.ones(3), torch.zeros(3)):
        assert torch.equal(compiled(x), doubled(x))
"""


def test_types_are_known_in_a_new_process(bare_python: list[str]) -> None:
    subprocess.run([*bare_python, "-W", "error::UserWarning", "-c", _ALONE], check=True)


def test_functions_that_write_make_the_program_run_in_python() -> None:
    total = torch.zeros(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        def adds(y: torch.Tensor) -> torch.Tensor:
            total.add_(1)
            return y * 2

        with torch.no_grad():
            return torch.cond(x.sum() > 0, adds, lambda y: y - 1, (x,))

    captured, written = Captured(fn), 0.0
    for _ in range(3):
        total.zero_()
        expected = _result_or_error(fn)
        once = total.clone()
        total.fill_(written)
        found = _result_or_error(captured)
        assert_same(found, expected, "result")
        written += once[0].item()
        assert torch.equal(total, torch.full((3,), written))


def _result_or_error(fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return what a program gives; torch 2.11 refuses functions that write."""
    try:
        return fn(torch.ones(3))
    except torch._dynamo.exc.UncapturedHigherOrderOpError as error:
        return type(error)


def test_what_torch_imports_for_such_a_call_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[tuple[str, ...]] = []
    monkeypatch.setattr(call_watch, "import_at_once", imported.append)
    x = torch.ones(2)
    fxkit.capture(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (x,))
    assert FOR_CONTROL_OPERATORS in imported


def test_what_torch_calls_for_such_a_call_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    enter = EnvironmentWalk.enter

    def noted(walk: EnvironmentWalk, frame: FrameType) -> None:
        entered.append(frame.f_code.co_filename)
        enter(walk, frame)

    monkeypatch.setattr(EnvironmentWalk, "enter", noted)
    x = torch.ones(2)
    captured = fxkit.capture(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (x,))
    assert torch.ops.higher_order.cond in _targets(captured)
    is_torchs = [name for name in entered if Path(torch.__file__).parent in Path(name).parents]
    assert __file__ in entered
    assert not is_torchs
