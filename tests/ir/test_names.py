"""`self` is the module in generated code, and neither a parameter nor a node."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit.ir.names import distinct_names


def first(self, x):
    return torch.relu(self) - x


def beside_a_like_name(self, self_1):
    return self - self_1


def with_a_default(x, self=2):
    return x * self


def by_keyword(x, *, self=2):
    return x - self


def any_number(x, *self):
    return x - self[0] - self[1]


PAIR = (torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0]))
PROGRAMS = [
    (first, PAIR),
    (beside_a_like_name, PAIR),
    (with_a_default, PAIR[:1]),
    (with_a_default, PAIR),
    (by_keyword, PAIR[:1]),
    (any_number, (*PAIR, PAIR[0])),
]


def parameters(gm: torch.fx.GraphModule) -> list[str]:
    return list(inspect.signature(gm.forward).parameters)


@pytest.mark.parametrize(("program", "args"), PROGRAMS)
def test_a_parameter_may_be_called_self(program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    expected = program(*args)
    traced = fxkit.symbolic_trace(program)
    assert torch.equal(traced(*args), expected)
    assert "self" not in parameters(traced)
    captured = fxkit.capture(program, args)
    assert torch.equal(captured(*args), expected)
    assert torch.equal(captured.graph_module(*args), expected)


def test_the_other_names_stay() -> None:
    assert parameters(fxkit.symbolic_trace(first)) == ["self_1", "x"]
    assert parameters(fxkit.symbolic_trace(beside_a_like_name)) == ["self_2", "self_1"]
    assert torch.equal(fxkit.symbolic_trace(first)(x=PAIR[1], self_1=PAIR[0]), first(*PAIR))


def test_self_may_be_given_by_keyword() -> None:
    captured = fxkit.capture(first, (), {"self": PAIR[0], "x": PAIR[1]})
    assert torch.equal(captured(self=PAIR[0], x=PAIR[1]), first(*PAIR))
    assert torch.equal(captured(x=PAIR[1], self=PAIR[0]), first(*PAIR))


def test_parameters_of_one_name_are_told_apart() -> None:
    def nested(x: dict[str, Tensor], x_a: Tensor) -> Tensor:
        return x["a"] - x_a

    args = ({"a": PAIR[0]}, PAIR[1])
    gm = fxkit.capture(nested, args).graph_module
    assert torch.equal(gm(*PAIR), nested(*args))


class Holder(nn.Module):
    """Has a buffer that is called self."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("self", PAIR[0])
        self.inner = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, "self") + self.inner(x)  # noqa: B009


def test_an_attribute_may_be_called_self() -> None:
    expected = Holder()(PAIR[1])
    assert torch.equal(fxkit.symbolic_trace(Holder())(PAIR[1]), expected)
    captured = fxkit.capture(Holder(), (PAIR[1],))
    assert torch.equal(captured.graph_module(PAIR[1]), expected)


def test_an_edit_gives_no_node_the_name_self() -> None:
    gm = fxkit.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    relu = fxkit.graph(gm)["_0"].fx_node
    with fxkit.edit(gm) as e:
        e.rename(relu, "self")
        made = e.call(torch.neg, relu, name="self", after=relu)
        e.replace_uses(relu, made)
    assert [relu.name, made.name] == ["self_1", "self_2"]
    assert torch.equal(gm(PAIR[0]), torch.tanh(-torch.relu(PAIR[0])))
    with pytest.raises(ZeroDivisionError), fxkit.edit(gm) as e:
        e.rename(relu, "other")
        raise ZeroDivisionError
    assert relu.name == "self_1"


def test_names_are_made_distinct() -> None:
    assert distinct_names(["x", "self", "x", "self_1"]) == ["x", "self_2", "x_1", "self_1"]


@pytest.mark.parametrize("is_trained", [False, True])
def test_parameters_named_by_numbers_become_inputs(is_trained: bool):
    net, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.randn(2, 3)
    captured = fxkit.capture(net, (x,), mode="aten", train=is_trained)
    torch.testing.assert_close(captured(x), net(x))
