"""Each instance of a class has programs of its own for the methods that its class compiles."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import fxkit
from fxkit.compiling.compiler import Compiled, CompiledMethod

X = torch.randn(3, 8)


class Block(nn.Module):
    """A residual block that compiles its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    @fxkit.compile
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the input and what the block adds."""
        return x + torch.tanh(self.linear(self.norm(x))) * scale

    def plain(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * scale


class Wide(Block):
    """Calls the compiled method of its base from a compiled method."""

    @fxkit.compile
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) * 2


class Threshold:
    """No module, and compares as equal to others."""

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Threshold)

    @fxkit.compile
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, max=self.bound).exp()


@torch.no_grad()
def test_many_instances_take_the_quick_way() -> None:
    net = nn.Sequential(*(Block() for _ in range(12)))
    expected = X
    for block in net:
        expected = block.plain(expected)
    for _ in range(3):
        torch.testing.assert_close(net(X), expected)
    assert all(block.forward._dispatch.last is not None for block in net)
    assert [block.forward.captured.recaptures for block in net] == [0] * 12


def test_a_program_sees_its_instance_change() -> None:
    one, two = Block(), Block()
    for _ in range(3):
        torch.testing.assert_close(one(X), one.plain(X))
        torch.testing.assert_close(two(X), two.plain(X))
    one.load_state_dict(two.state_dict())
    torch.testing.assert_close(one(X), two.plain(X))
    one.linear = nn.Linear(8, 8)
    torch.testing.assert_close(one(X, scale=0.5), one.plain(X, scale=0.5))
    one.double()
    torch.testing.assert_close(one(X.double()), one.plain(X.double()))


def test_a_method_is_trained() -> None:
    block, twin = Block(), Block()
    twin.load_state_dict(block.state_dict())
    for _ in range(3):
        block(X).square().sum().backward()
        twin.plain(X).square().sum().backward()
        for ours, theirs in zip(block.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_it_looks_like_a_method() -> None:
    block = Block()
    method = block.forward
    assert isinstance(method, CompiledMethod) and method is block.forward
    assert method.__self__ is block and method.__func__ is Block.forward
    assert isinstance(Block.forward, Compiled) and not isinstance(Block.forward, CompiledMethod)
    assert method.__name__ == "forward" and "adds" in str(method.__doc__)
    assert list(inspect.signature(method).parameters) == ["x", "scale"]
    method(X)
    assert "fused" in method.report() or "kernel" in method.report()
    assert not list(block.named_buffers()) and len(block.state_dict()) == 4


def test_methods_of_base_classes() -> None:
    wide = Wide()
    for _ in range(3):
        torch.testing.assert_close(wide(X), wide.plain(X) * 2)
        torch.testing.assert_close(Block.forward(wide, X), wide.plain(X))
        torch.testing.assert_close(super(Wide, wide).forward(X), wide.plain(X))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_copies_of_an_instance_have_programs_of_their_own(again) -> None:
    block = Block()
    block(X)
    other = again(block)
    other.linear = nn.Linear(8, 8)
    for _ in range(2):
        torch.testing.assert_close(other(X), other.plain(X))
        torch.testing.assert_close(block(X), block.plain(X))
    assert other.forward is not block.forward


def test_methods_are_copied_and_pickled_with_their_instance() -> None:
    method = Block().forward
    method(X)
    assert copy.copy(method) is method
    for other in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert isinstance(other, CompiledMethod) and other.__self__ is not method.__self__
        torch.testing.assert_close(other(X), method(X))
        assert other.__self__.forward is other


@pytest.mark.usefixtures("few_objects")
def test_an_instance_is_freed_with_its_programs() -> None:
    block = Block()
    for _ in range(3):
        block(X)
    seen = weakref.ref(block)
    del block
    gc.collect()
    assert seen() is None


def test_objects_that_are_no_modules() -> None:
    few = [Threshold(float(bound)) for bound in range(4)]
    for _ in range(3):
        for it in few:
            torch.testing.assert_close(it.apply(X), torch.clamp(X, max=it.bound).exp())
    assert all(isinstance(it.apply, CompiledMethod) for it in few)
    assert all(vars(it) == {"bound": it.bound} for it in few)
    few[0].bound = 0.5
    torch.testing.assert_close(few[0].apply(X), torch.clamp(X, max=0.5).exp())


def test_compiled_methods_within_a_captured_program() -> None:
    net = nn.Sequential(Block(), Block())
    expected = net[1].plain(net[0].plain(X))
    outer = fxkit.compile(net)
    for _ in range(3):
        torch.testing.assert_close(outer(X), expected)
        torch.testing.assert_close(net(X), expected)
    captured = fxkit.capture(net, (X,))
    assert captured.whole
    torch.testing.assert_close(captured(X), expected)


def test_threads_that_call_first_share_a_program() -> None:
    block = Block()
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(block.forward)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(it is found[0] for it in found)


def test_captured_methods_are_bound() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    plain = Net()
    Net.forward = fxkit.capture(Net.forward, (plain, X))
    net = Net()
    torch.testing.assert_close(net(X), net.linear(X).relu())
    torch.testing.assert_close(plain(X), plain.linear(X).relu())
