"""The quick way into a program that is trained: used where nothing changed, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit.lower.training import training_module


class Net(nn.Module):
    """A norm with its activation; with a switch, and with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.factor = 2.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        return F.gelu(normed) * self.factor, normed.sigmoid()


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape or (64, 32), requires_grad=True)


def warm(net: nn.Module, x: Tensor) -> Any:
    program = fxkit.compile(net).program
    for _ in range(3):
        program(x)
    assert program._dispatch.paths
    return program


def step(program: Callable[..., Any], net: nn.Module, x: Tensor) -> tuple[Tensor | None, ...]:
    results = program(x)
    wanted = [t for t in (x, *net.parameters()) if t.requires_grad]
    weights = [torch.linspace(-1, 1, r.numel()).view(r.shape).to(r.dtype) for r in results]
    return (*results, *torch.autograd.grad(results, wanted, weights))


def check(program: Any, net: nn.Module, x: Tensor) -> None:
    for found, expected in zip(step(program, net, x), step(net, net, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_calls_like_the_first_go_the_quick_way(slow_ways: list[int]) -> None:
    net, x = Net(), inputs()
    program = warm(net, x)
    slow_ways.clear()
    for given in (x, inputs(), x):
        check(program, net, given)
    with torch.no_grad():
        net.norm.weight.mul_(2)
    check(program, net, x)
    assert not slow_ways


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "x",
    [
        inputs(65, 32), inputs(2, 64, 32), torch.randn(32, 64).t().requires_grad_(),
        torch.randn(64, 32), inputs().double(), nn.Parameter(torch.randn(64, 32)),
    ],
    ids=["shape", "rank", "stride", "no gradient", "f64", "parameter"],
)  # fmt: skip
def test_other_arguments_go_the_slow_way(x: Tensor, slow_ways: list[int]) -> None:
    net = Net()
    program = warm(net, inputs())
    slow_ways.clear()
    if x.dtype is torch.float64:
        net.double()
        x = x.detach().requires_grad_()
    check(program, net, x)
    assert slow_ways


def _freeze(net: Net) -> None:
    net.norm.weight.requires_grad_(False)


def _replace(net: Net) -> None:
    net.norm.weight = nn.Parameter(torch.randn(32))


def _switch(net: Net) -> None:
    net.factor = -3.0


def _hook(net: Net) -> None:
    net.norm.register_forward_hook(lambda module, args, result: result * 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", [_freeze, _replace, _switch, _hook])
def test_what_changes_in_the_program_is_seen(change: Callable[[Net], None]) -> None:
    net, x = Net(), inputs()
    program = warm(net, x)
    change(net)
    for _ in range(3):
        check(program, net, x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_are_seen(mode: Callable[[], Any]) -> None:
    net, x = Net(), inputs()
    program = warm(net, x)
    with mode():
        for found, expected in zip(program(x), net(x), strict=True):
            torch.testing.assert_close(found, expected)
            assert not found.requires_grad


def test_autocast_is_seen() -> None:
    net, x = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()), inputs(128, 32)
    program = warm(net, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert program(x).dtype == net(x).dtype


def test_gradients_can_be_asked_for_twice_and_differentiated() -> None:
    net, x = Net(), inputs()
    program = warm(net, x)
    for fn in (program, net):
        first = torch.autograd.grad(fn(x)[0].sum(), x, create_graph=True)[0]
        again = torch.autograd.grad(first.square().sum(), x)[0]
        if fn is program:
            found = (first, again)
        else:
            torch.testing.assert_close(found, (first, again), rtol=1e-3, atol=1e-3)
    results = program(x)[0].sum()
    results.backward(retain_graph=True)
    once = x.grad.clone()
    results.backward()
    torch.testing.assert_close(x.grad, 2 * once)


def test_one_result_of_two_is_enough() -> None:
    net, x = Net(), inputs()
    program = warm(net, x)
    for number in (0, 1):
        (found,) = torch.autograd.grad(program(x)[number].sum(), x)
        (expected,) = torch.autograd.grad(net(x)[number].sum(), x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_function_transforms_see_the_program() -> None:
    net, x = Net(), inputs()
    program = warm(net, x)
    found = torch.func.grad(lambda x: program(x)[0].sum())(x.detach())
    expected = torch.func.grad(lambda x: net(x)[0].sum())(x.detach())
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_tangents_and_tracers_are_seen() -> None:
    net, x = Net().requires_grad_(False), inputs()
    program = warm(net, x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for found, expected in zip(program(dual), net(dual), strict=True):
            tangents = [forward_ad.unpack_dual(t).tangent for t in (found, expected)]
            torch.testing.assert_close(*tangents)
    other = inputs()
    traced = torch.jit.trace(lambda given: program(given), x)
    torch.testing.assert_close(traced(other), net(other))
