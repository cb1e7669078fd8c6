"""Calls that are left to eager: the program itself runs, and guards are asked seldom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxkit
from fxkit.compiling.compiler import Compiled
from fxkit.lower.dispatch.eager_fallback import CALLS_ON_TRUST
from fxkit.lower.training.training_module import TrainingModule
from fxkit.passes.pipelines import SIMPLIFY
from fxkit.tracing.captured import Captured


class _Net(nn.Module):
    """Small; with a switch that makes another program of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.factor


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the captured program was called, guards and all: one entry a call."""
    calls: list[int] = []
    run = Captured.__call__

    def counted(self: Captured, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(args))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Captured, "__call__", counted)
    return calls


def _eager_calls(compiled: Compiled) -> list[int]:
    return [
        m.report().eager_calls for m in compiled.compiled_modules if isinstance(m, TrainingModule)
    ]


def test_small_programs_run_themselves(asked: list[int]):
    net = _Net()
    compiled = fxkit.compile(net)
    x = torch.randn(2, 4)
    compiled(x)
    asked.clear()
    for _ in range(20):
        assert torch.equal(compiled(x), net(x))
    assert len(asked) <= 1
    assert _eager_calls(compiled)[0] >= 20


@torch.no_grad()
def test_graphs_without_kernels_are_the_programs_own(asked: list[int]):
    net = nn.LSTM(4, 4)
    compiled, x = fxkit.compile(net), torch.randn(3, 2, 4)
    compiled(x)
    compiled(x)
    asked.clear()
    for factor in (1.0, 2.0):
        net.weight_hh_l0.mul_(factor)
        for _ in range(10):
            torch.testing.assert_close(compiled(x), net(x))
    assert len(asked) <= 1
    (module,) = compiled.compiled_modules
    assert not module.has_kernels and module.calls_in_eager >= 20
    assert sum(module.report().eager_calls.values()) == module.calls_in_eager


def test_gradients_and_what_changes_are_those_of_the_program(asked: list[int]):
    net = _Net()
    compiled = fxkit.compile(net)
    x = torch.randn(2, 4)
    for factor in (1.0, 1.0, 1.0, -2.0, -2.0, 3.0):
        net.factor = factor
        net.zero_grad()
        compiled(x).sum().backward()
        assert net.linear.weight.grad is not None
        (expected,) = torch.autograd.grad(net(x).sum(), net.linear.weight)
        assert torch.equal(net.linear.weight.grad, expected)


def test_other_kinds_of_calls_are_compiled(asked: list[int]):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2).exp() + x

    compiled = fxkit.compile(fn)
    small, large = (torch.randn(n, n, requires_grad=True) for n in (4, 1024))
    for _ in range(3):
        compiled(small)
    asked.clear()
    compiled(large)
    with torch.no_grad():
        compiled(small)
    assert len(asked) == 2
    reasons = [m.reason for m in compiled.compiled_modules if isinstance(m, TrainingModule)]
    assert len(reasons) == 2 and reasons[0] is not None and reasons[1] is None


def test_guards_are_asked_again_after_a_while(asked: list[int]):
    compiled = fxkit.compile(_Net())
    x = torch.randn(2, 4)
    for _ in range(2):
        compiled(x)
    asked.clear()
    for _ in range(CALLS_ON_TRUST + 1):
        compiled(x)
    assert len(asked) == 1


def test_a_program_that_pays_by_now_is_compiled():
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.weight * 2).exp() + x.sum()

    net = Grows()
    compiled = fxkit.compile(net)
    x = torch.randn(2, 4)
    for _ in range(3):
        compiled(x)
    net.weight = nn.Parameter(torch.randn(1024, 1024))
    for _ in range(CALLS_ON_TRUST + 1):
        found = compiled(x)
    torch.testing.assert_close(found, net(x))
    last = compiled.compiled_modules[-1]
    assert isinstance(last, TrainingModule) and last.reason is None


def test_passes_that_were_asked_for_stay_in_force(asked: list[int]):
    compiled = fxkit.compile(_Net(), passes=SIMPLIFY)
    x = torch.randn(2, 4)
    for _ in range(3):
        compiled(x)
    assert len(asked) == 3


def asking(x: torch.Tensor) -> torch.Tensor:
    y = x.detach()
    y.requires_grad_(True)
    return (y * 2).sin()


def forces(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad((y.sin() ** 2).sum(), y)[0]


@pytest.mark.parametrize("program", [asking, forces])
@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_that_a_program_asks_for(
    program: Callable[[torch.Tensor], torch.Tensor], enabled: bool
) -> None:
    compiled = fxkit.compile(program)
    with torch.set_grad_enabled(enabled):
        for _ in range(3):
            x = torch.randn(30, 20)
            found, expected = compiled(x), program(x)
            torch.testing.assert_close(found, expected)
            assert found.requires_grad == expected.requires_grad and not x.requires_grad


def test_gradients_that_a_program_turns_on() -> None:
    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return (x * weight).sin()

    compiled = fxkit.compile(program)
    weight = torch.randn(20, requires_grad=True)
    with torch.no_grad():
        for _ in range(3):
            result = compiled(torch.randn(30, 20), weight)
            assert result.requires_grad
    result.sum().backward()
    assert weight.grad is not None


def test_gradients_that_are_turned_on_for_nothing_are_compiled() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return (x * 2).sin().exp()

    compiled = fxkit.compile(program)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(300, 200)
            torch.testing.assert_close(compiled(x), program(x))
    assert compiled.compiled_modules[0].has_kernels


def test_quantised_inputs(recwarn: pytest.WarningsRecorder) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.dequantize() * 2

    compiled = fxkit.compile(program)
    for scale in (0.1, 0.5, 0.1):
        x = torch.quantize_per_tensor(torch.randn(4, 4), scale, 0, torch.qint8)
        torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)
    assert "quantised" in compiled.report()
    recwarn.clear()
    compiled(x)
    assert not recwarn.list


def test_branches_with_gradients(recwarn: pytest.WarningsRecorder) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v.sin(), (x,))

    fast = fxkit.compile(program)
    for x in (torch.ones(4), -torch.ones(4), torch.ones(4)):
        gradients = [torch.autograd.grad(f(x.requires_grad_()).sum(), x) for f in (program, fast)]
        torch.testing.assert_close(*gradients)
    assert not recwarn.list and "the gradient of %cond" in fast.report()
