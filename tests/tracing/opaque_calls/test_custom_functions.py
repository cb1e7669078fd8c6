"""Custom autograd functions are opaque calls: Python state and texts of theirs are as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxkit
from fxkit.errors import CaptureError
from fxkit.tracing.recorder.recorded import application_of

LOG: list[str] = []


class Counted(torch.autograd.Function):
    """Counts on its own class, which the program refers to."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2


class WithContext(Counted):
    """Counts in both of its halves."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        Counted.calls += 1
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Counted.calls += 10


class Logged(Counted):
    """Writes to a list, and to the standard output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        LOG.append("forward")
        print("forward")
        return x * 2


class Plain(Counted):
    """Does nothing but to compute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone() * 2


class Counting(nn.Module):
    """Has a function that counts on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        module = self

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                module.calls += 1
                return x * 2

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> Any:
                return grads[0] * 2

        return Inner.apply(Counted.apply(x)).sin()  # type: ignore[attr-defined]


def applied(kind: Any) -> Callable[[], Callable[..., Any]]:
    def make() -> Callable[..., Any]:
        return lambda x: kind.apply(kind.apply(x) + 1).sin()

    return make


PROGRAMS = [*map(applied, (Counted, WithContext, Logged, Plain)), Counting]


def _history(program: Callable[..., Any], run: Callable[..., Any], printed: Callable[[], str]):
    """Return results, gradients and state of a few calls, as texts."""
    found = []
    for scale in (1.0, 2.0, 3.0):
        x = torch.full((3,), scale, requires_grad=True)
        y = run(x)
        y.sum().backward()
        assert x.grad is not None
        state = (Counted.calls, len(LOG), getattr(program, "calls", 0), printed())
        found.append((y.tolist(), x.grad.tolist(), state))
    return found


def _reset() -> None:
    Counted.calls = 0
    LOG.clear()


@pytest.mark.parametrize("make", PROGRAMS, ids=["counted", "halves", "logged", "plain", "module"])
def test_state_and_texts_are_those_of_eager(
    make: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def printed() -> str:
        return capsys.readouterr().out

    program = make()
    _reset()
    expected = _history(program, program, printed)
    other = make()
    _reset()
    assert _history(other, fxkit.compile(other), printed) == expected


@pytest.mark.parametrize("make", PROGRAMS[:4], ids=["counted", "halves", "logged", "plain"])
def test_each_call_of_a_captured_program_counts(make: Callable[[], Any]) -> None:
    x = torch.ones(3, requires_grad=True)
    captured = fxkit.capture(make(), (x,))
    _reset()
    for _ in range(3):
        captured(x)
    counts = Counted.calls, len(LOG)
    _reset()
    for _ in range(3):
        make()(x)
    assert counts == (Counted.calls, len(LOG))
    assert captured.recaptures == 0 and captured.whole


def test_a_program_that_reads_what_the_function_changes_is_refused() -> None:
    program = lambda x: Counted.apply(x) * Counted.calls  # noqa: E731
    with pytest.raises(CaptureError, match=r"an opaque call changes Counted\.calls"):
        fxkit.capture(program, (torch.ones(3, requires_grad=True),))
    _reset()
    compiled = fxkit.compile(program)
    found = [compiled(torch.ones(1, requires_grad=True)).item() for _ in range(3)]
    assert found == [2.0, 4.0, 6.0]


def test_functions_without_effects_are_typed_by_running_them() -> None:
    x = torch.ones(3, requires_grad=True)
    captured = fxkit.capture(lambda x: Plain.apply(x).sin(), (x,))
    assert captured.graph_module.graph.find_nodes(op="call_function", target=application_of(Plain))
