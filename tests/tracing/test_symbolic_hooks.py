"""Hooks of modules that are followed: part of the graph, or refused."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.nn.utils import parametrizations, spectral_norm

from fxkit.errors import CaptureError, UnsupportedError
from fxkit.tracing.capture_modes import capture
from fxkit.tracing.symbolic import symbolic_trace

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor, gain: float = 2.0, *, shift: float = 0.5) -> torch.Tensor:
        return self.rest(self.first(x)).sin() * gain + shift


class Called(Net):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 1


class Several(nn.Module):
    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return xs[0] * 2


def _weight(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(layer)


def _assert_same(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compare the graph with the module, with other weights than those it was traced with."""
    gm = symbolic_trace(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    before = copy.deepcopy(module.state_dict())
    expected = module(*args, **kwargs)
    module.load_state_dict(before)
    torch.testing.assert_close(gm(*args, **kwargs), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", [spectral_norm, _weight, parametrizations.weight_norm])
def test_norms_of_weights_at_the_root(norm: Callable[..., nn.Module], training: bool):
    _assert_same(norm(nn.Linear(4, 6)).train(training), X)


def test_a_hook_that_triples_the_result_of_the_root():
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, args, result: result * 3)
    _assert_same(layer, X)
    for program in (functools.partial(layer), lambda x: layer(x)):
        torch.testing.assert_close(symbolic_trace(program)(X), layer(X))


def test_hooks_see_what_is_given_by_keyword():
    net = Net()
    net.register_forward_hook(lambda _, args, kwargs, y: y * kwargs["shift"], with_kwargs=True)
    _assert_same(net, X, 3.0, shift=2.0)


def test_a_forward_or_a_call_of_its_own():
    net = Net()
    net.forward = lambda x: x * 7
    _assert_same(net, X)
    _assert_same(Called(), X)


def test_mode_symbolic_takes_them():
    net = Net()
    net.register_forward_hook(lambda module, args, result: result * 3)
    torch.testing.assert_close(capture(net, (X,), mode="symbolic")(X), net(X))


def test_hooks_for_gradients_are_refused_where_code_is_followed():
    net = Net()
    handle = net.first.register_full_backward_hook(lambda *_: None)
    _assert_same(net, X)  # a layer of torch stays a call, and runs its hooks
    handle.remove()
    for module in (net, net.rest):
        handle = module.register_full_backward_hook(lambda *_: None)
        with pytest.raises(CaptureError, match="for gradients"):
            symbolic_trace(net)
        handle.remove()


@pytest.mark.parametrize(
    "register",
    [
        register_module_forward_hook,
        register_module_forward_pre_hook,
        register_module_full_backward_hook,
    ],
)
def test_hooks_for_all_modules_are_refused(register: Callable[..., Any]):
    net, layer = Net(), nn.Linear(4, 4)
    handle = register(lambda *_: None)
    try:
        for program in (net, layer, lambda x: layer(x)):
            with pytest.raises(CaptureError, match="calls of all modules"):
                symbolic_trace(program)
        symbolic_trace(torch.relu)
    finally:
        handle.remove()


def test_hooks_of_a_module_of_any_arguments_are_refused():
    module = Several()
    assert symbolic_trace(module)(X).equal(X * 2)
    module.register_forward_hook(lambda module, args, result: result * 3)
    with pytest.raises(UnsupportedError, match="takes any number"):
        symbolic_trace(module)


# Drawn modules ----------------------------------------------------------------------------------


def _drawn(seed: int) -> Iterator[nn.Module]:
    draw = random.Random(seed)

    def layer() -> nn.Module:
        made: nn.Module = draw.choice([nn.Linear(4, 4), Net(), nn.LayerNorm(4), nn.Tanh()])
        if isinstance(made, nn.Linear) and draw.random() < 0.5:
            made = draw.choice([spectral_norm, _weight, parametrizations.spectral_norm])(made)
        return hooked(made)

    def hooked(module: nn.Module) -> nn.Module:
        for _ in range(draw.choice([0, 0, 1, 2])):
            gain, options = draw.uniform(0.5, 2), {"prepend": draw.random() < 0.5}
            if draw.random() < 0.4:
                module.register_forward_pre_hook(
                    lambda module, args, gain=gain: (args[0] * gain, *args[1:]), **options
                )
            elif draw.random() < 0.5:
                module.register_forward_hook(
                    lambda module, args, kwargs, result, gain=gain: result.cos() + args[0] * gain,
                    with_kwargs=True,
                    **options,
                )
            else:
                options["always_call"] = draw.random() < 0.5
                module.register_forward_hook(lambda m, a, y, gain=gain: y * gain, **options)
        return module

    inner = nn.Sequential(*(layer() for _ in range(draw.choice([1, 2, 3]))))
    yield hooked(draw.choice([layer(), inner])).train(draw.random() < 0.5)


def _check(seed: int) -> None:
    torch.manual_seed(seed)
    for module in _drawn(seed):
        _assert_same(module, X)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_modules_with_hooks(seed: int):
    _check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(20, 1000))
def test_many_drawn_modules_with_hooks(seed: int):
    _check(seed)
