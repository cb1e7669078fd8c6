"""Activation checkpoints: calls like others without gradients, in Python with them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxkit


class Net(nn.Module):
    """A few layers, used by the programs below."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def block(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Compute what is checkpointed."""
        return self.dropout(torch.relu(self.first(x))) * scale


PROGRAMS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "plain": lambda net, x: checkpoint(net.block, x, use_reentrant=False),
    "keywords": lambda net, x: checkpoint(net.block, x, scale=2.0, use_reentrant=False),
    "random numbers": lambda net, x: checkpoint(
        net.block, x, use_reentrant=False, preserve_rng_state=False
    ),
    "nested": lambda net, x: checkpoint(
        lambda y: checkpoint(net.block, y, use_reentrant=False) * net.second(y),
        x,
        use_reentrant=False,
    ),
    "layers": lambda net, x: checkpoint_sequential(net.layers, 2, x, use_reentrant=False),
    "statistics": lambda net, x: checkpoint(net.norm, x, use_reentrant=False),
}


def same(compiled: Callable[..., Tensor], net: Net, name: str, *, needs_grad: bool) -> None:
    """Call a program compiled and in eager, and compare all that they did."""
    apart = copy.deepcopy(net)
    for seed in range(3):
        x = torch.randn(4, 8, requires_grad=needs_grad)
        twin = x.detach().clone().requires_grad_(needs_grad)
        torch.manual_seed(seed)
        found = compiled(net, x)
        torch.manual_seed(seed)
        expected = PROGRAMS[name](apart, twin)
        torch.testing.assert_close(found, expected)
        if needs_grad:
            found.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(x.grad, twin.grad)
        for one, other in zip(net.buffers(), apart.buffers(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_gradients_a_checkpoint_is_a_plain_call(name: str) -> None:
    compiled, net = fxkit.compile(PROGRAMS[name]), Net()
    with torch.no_grad():
        same(compiled, net, name, needs_grad=False)
    assert len(compiled.captured.graphs) == 1


@pytest.mark.parametrize("name", ["plain", "statistics"])
def test_with_gradients_a_program_runs_in_python(name: str) -> None:
    compiled, net = fxkit.compile(PROGRAMS[name]), Net()
    same(compiled, net, name, needs_grad=True)
    assert not compiled.captured.graphs
