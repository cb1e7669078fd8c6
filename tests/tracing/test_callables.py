"""Callables of every kind are traced and captured; what can't be is said in our own words."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.errors import CaptureError, UnsupportedError

X = torch.linspace(-1, 1, 12).reshape(3, 4)
SCALE = torch.full((4,), 3.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, a: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.layer(a) * scale

    def encode(self, a: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(a) * self.layer.bias * scale + self.shift

    @staticmethod
    def double(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    @classmethod
    def named(cls, a: torch.Tensor) -> torch.Tensor:
        return a * len(cls.__name__)


class Called:
    """An object of no module class that holds a module and a tensor."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 4)
        self.weight = torch.ones(4)

    def __call__(self, a: torch.Tensor) -> torch.Tensor:
        return self.layer(a) * self.weight

    def method(self, a: torch.Tensor, factor: int = 2) -> torch.Tensor:
        return self(a) * factor


def with_keyword(a: torch.Tensor, *, factor: float = 3.0) -> torch.Tensor:
    return a * factor


@functools.lru_cache(maxsize=1)
def memoised(a: torch.Tensor) -> torch.Tensor:
    return a * 2


NET, CALLED, PARAMETER = Net(), Called(), nn.Parameter(torch.ones(4))
CALLABLES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "torch": (torch.relu, (X,)),
    "of two": (torch.add, (X, X)),
    "of three": (torch.where, (X > 0, X, -X)),
    "of a list": (torch.stack, ([X, X],)),
    "reduction": (torch.sum, (X,)),
    "functional in C": (F.gelu, (X,)),
    "functional": (F.relu, (X,)),
    "overload": (torch.ops.aten.add.Tensor, (X, X)),
    "packet": (torch.ops.aten.relu, (X,)),
    "operator": (operator.mul, (X, X)),
    "attribute": (operator.attrgetter("T"), (X,)),
    "item": (operator.itemgetter(0), (X,)),
    "method by name": (operator.methodcaller("relu"), (X,)),
    "method of tensors": (torch.Tensor.relu, (X,)),
    "operator of tensors": (torch.Tensor.__add__, (X, X)),
    "bound to a tensor": (SCALE.add, (X,)),
    "all bound": (SCALE.relu, ()),
    "partial": (functools.partial(torch.softmax, dim=-1), (X,)),
    "partial of another overload": (functools.partial(torch.sum, dim=1), (X,)),
    "partial with a tensor": (functools.partial(torch.mul, SCALE), (X,)),
    "partial of a function": (functools.partial(with_keyword, factor=5.0), (X,)),
    "partial of a module": (functools.partial(NET, scale=3.0), (X,)),
    "partial of a method": (functools.partial(NET.encode, scale=3.0), (X,)),
    "partial of a partial": (functools.partial(functools.partial(torch.clamp, min=0), max=1), (X,)),
    "object": (CALLED, (X,)),
    "method of an object": (CALLED.method, (X,)),
    "method of a module": (NET.encode, (X,)),
    "static": (NET.double, (X,)),
    "class method": (Net.named, (X,)),
    "default": (lambda a, factor=2: a * factor, (X,)),
    "default that is a tensor": (lambda a, factor=SCALE: a * factor, (X,)),
    "keyword": (with_keyword, (X,)),
    "memoised": (memoised, (X,)),
    "modules from outside": (lambda a: NET(a) + NET.layer(a) * PARAMETER, (X,)),
    "captured": (fxkit.capture(NET, (X,)), (X,)),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_any_callable_is_traced(name: str):
    fn, args = CALLABLES[name]
    module = fxkit.symbolic_trace(fn)
    fxkit.verify(module)
    assert torch.equal(module(*args), fn(*args))


@pytest.mark.parametrize("mode", ["symbolic", "whole"])
@pytest.mark.parametrize("name", CALLABLES)
def test_any_callable_is_captured(name: str, mode: str):
    fn, args = CALLABLES[name]
    captured = fxkit.capture(fn, args, mode=mode)
    assert torch.equal(captured(*args), fn(*args)) and captured.recaptures == 0


def test_a_builtin_is_one_node_with_a_placeholder_for_each_argument_it_needs():
    graph = fxkit.symbolic_trace(torch.addmm).graph
    names = [(node.op, str(node.target)) for node in graph.nodes]
    assert [name for op, name in names if op == "placeholder"] == ["input", "mat1", "mat2"]
    assert [op for op, _ in names if op.startswith("call")] == ["call_function"]


def test_what_a_function_takes_from_outside_is_held_by_the_graph_module():
    module = fxkit.symbolic_trace(lambda a: NET.layer(a) * PARAMETER + NET.layer(a))
    assert {id(p) for p in module.parameters()} == {
        id(NET.layer.weight), id(NET.layer.bias), id(PARAMETER)
    }  # fmt: skip
    assert not any(name.startswith("_tensor_constant") for name in vars(NET))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (Net, "got the class Net"),
        (print, "got print, which is compiled code"),
        ((a for a in ()).__next__, "got __next__"),
    ],
)
def test_what_is_left_is_refused_in_our_words(fn: Any, message: str):
    with pytest.raises(UnsupportedError, match=message) as caught:
        fxkit.symbolic_trace(fn)
    assert caught.value.hint


def test_generators_and_transforms_are_refused_with_a_remedy():
    def rows(a: torch.Tensor) -> Any:
        yield from a

    with pytest.raises(UnsupportedError, match="got rows, which gives them later"):
        fxkit.symbolic_trace(rows)
    for fn in (torch.func.grad(lambda a: a.sum()), lambda a: torch.vmap(torch.sin)(a)):
        with pytest.raises(CaptureError, match="which looks for tensors") as caught:
            fxkit.symbolic_trace(fn)
        assert "fxkit.capture" in str(caught.value.hint)


def test_a_module_that_the_traced_one_does_not_hold():
    class Calls(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return NET.layer(a)

    with pytest.raises(CaptureError, match="a call of a module that it does not hold"):
        fxkit.symbolic_trace(Calls())
