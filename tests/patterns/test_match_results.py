"""Where a pattern occurs, in which spelling and order, and where it does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.op import Attribute
from fxkit.patterns.engine import find
from fxkit.patterns.language import any_of, named, optional, repeated
from fxkit.patterns.match_results import Match, Miss
from fxkit.patterns.matcher import _Search as Search
from fxkit.patterns.matcher import match_at
from fxkit.patterns.templates import pattern
from fxkit.tracing.symbolic import symbolic_trace

_X = torch.randn(3, 4)


def _typed(program: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    gm = symbolic_trace(program)
    if args:
        propagate_types(gm, args)
    return gm


# pattern, program, how often it occurs there
_OCCURRENCES: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "method for function": (lambda x: torch.relu(x), lambda x: x.relu(), 1),
    "functional for function": (lambda x: torch.relu(x), lambda x: F.relu(x), 1),
    "overload for function": (lambda x: torch.relu(x), lambda x: torch.ops.aten.relu(x), 1),
    "function for functional": (lambda x: F.softmax(x, -1), lambda x: x.softmax(dim=-1), 1),
    "keywords for positions": (lambda x: x.sum(1, True), lambda x: torch.sum(x, dim=1,
                                                                          keepdim=True), 1),
    "in place is another": (lambda x: torch.relu(x), lambda x: x.relu_(), 0),
    "inplace=True is another": (lambda x: F.relu(x), lambda x: F.relu(x, inplace=True), 0),
    "out= is another": (lambda x, y: x + y, lambda x, y: torch.add(x, x, out=y), 0),
    "both orders": (lambda x, y: torch.sigmoid(x) * y, lambda x, y: y * torch.sigmoid(x), 1),
    "both orders, deeper": (
        lambda x, y: (torch.exp(x) + y) * torch.sin(y),
        lambda x, y: torch.sin(y) * (y + torch.exp(x)), 1,
    ),
    "not in the other order": (lambda x, y: x - torch.exp(y), lambda x, y: torch.exp(y) - x, 0),
    "default required": (lambda x, y: torch.add(x, y), lambda x, y: torch.add(x, y, alpha=5), 0),
    "default given": (lambda x, y: x + y, lambda x, y: torch.add(x, y, alpha=1), 1),
    "not default": (lambda x, y: torch.add(x, y, alpha=5), lambda x, y: torch.add(x, y), 0),
    "scaled in order": (
        lambda x, y: torch.add(torch.exp(x), y, alpha=5),
        lambda x, y: torch.add(y, torch.exp(x), alpha=5), 0,
    ),
    "one capture twice": (lambda x: x * torch.sigmoid(x), lambda x: x * torch.sigmoid(x), 1),
    "one capture, two values": (lambda x: x * torch.sigmoid(x),
                                lambda x, y: x * torch.sigmoid(y), 0),
    "two captures, one value": (lambda x, y: x * y, lambda x: x * x, 1),
    "list of two": (lambda x, y: torch.cat([x, y]), lambda x, y: torch.cat((x, y)), 1),
    "list of three": (lambda x, y: torch.cat([x, y]), lambda x, y: torch.cat([x, y, x]), 0),
    "list with an operation": (lambda x, y: torch.cat([-x, y], 1),
                               lambda x, y: torch.cat([-x, y], dim=1), 1),
    "literal": (lambda x: x * 2, lambda x: x * 2, 1),
    "other literal": (lambda x: x * 2, lambda x: x * 3, 0),
    "literal on the other side": (lambda x: x * 2, lambda x: 2 * x, 1),
    "reflected subtraction": (lambda x: 1 - x, lambda x: torch.rsub(x, 1), 1),
    "capture of a literal": (lambda x, p: x * p, lambda x: x * 2.5, 1),
    "capture in a list": (lambda x, a: x.view(a, 4), lambda x: x.view(-1, 4), 1),
    "capture of a list": (lambda x, shape: x.view(shape), lambda x: x.view(-1, 4), 1),
    "overlapping": (lambda x: torch.relu(torch.relu(x)), lambda x: x.relu().relu().relu(), 2),
    "same value asked twice": (lambda x: -x * -x, lambda x: -x * -x, 1),
    "shared value": (
        lambda x: (lambda n: n * torch.exp(n))(-x),
        lambda x: (lambda n: n * torch.exp(n))(-x), 1,
    ),
    "shared value, two values": (lambda x: (lambda n: n * torch.exp(n))(-x),
                                 lambda x: -x * torch.exp(-x), 0),
    "getitem": (lambda x: x[0], lambda x: x[0], 1),
    "another index": (lambda x: x[0], lambda x: x[1], 0),
    "slice": (lambda x: x[:, 1:], lambda x: x[:, 1:], 1),
    "a slice with its start and step": (lambda x: x[:, :2], lambda x: x[:, 0:2:1], 1),
    "a slice without them": (lambda x: x[0:2:1, None], lambda x: x[:2, None], 1),
    "a slice of all": (lambda x: x[:, 0:], lambda x: x[:, :], 1),
    "a slice with another step": (lambda x: x[:2], lambda x: x[0:2:2], 0),
    "a slice with a computed start": (lambda x: x[0:2], lambda x: x[x.shape[1] :2], 0),
    "another slice": (lambda x: x[:, 1:], lambda x: x[:, 2:], 0),
    "captures in a slice": (lambda x, a, b: x[a:b], lambda x: x[1:3], 1),
    "captures in an open slice": (lambda x, a, b: x[a:b], lambda x: x[1:], 1),
    "captures in a slice with a step": (lambda x, a, b: x[a:b], lambda x: x[1:3:2], 0),
    "captures in one of several slices": (lambda x, a, b: x[:, a:b], lambda x: x[:, 1:3], 1),
    "captures in the other slice": (lambda x, a, b: x[:, a:b], lambda x: x[1:3, :], 0),
    "captures in a slice, an index": (lambda x, a, b: x[a:b], lambda x: x[1], 0),
    "a computed bound of a slice": (lambda x, y: x[y.shape[1] :], lambda x: x[x.shape[1] :], 1),
    "one capture, two bounds": (lambda x, a: x[a:] + x[:a], lambda x: x[1:] + x[:2], 0),
    "one capture, equal bounds": (lambda x, a: x[a:] + x[:a], lambda x: x[1:] + x[:1], 1),
    "a dtype to convert to": (lambda x, dt: x.to(dt), lambda x: x.to(torch.float16), 1),
    "a dtype by keyword": (lambda x, dt: x.to(dt), lambda x: x.to(dtype=torch.float16), 1),
    "a cast by name": (lambda x, dt: x.to(dt), lambda x: x.half(), 1),
    "a device to convert to": (lambda x, dt: x.to(dt), lambda x: x.to("cpu"), 1),
    "a tensor to convert like": (lambda x, dt: x.to(dt), lambda x, y: x.to(y), 1),
    "a dtype, copied": (lambda x, dt: x.to(dt), lambda x: x.to(torch.float16, copy=True), 0),
    "a dtype, copied in both": (lambda x, dt: x.to(dt, copy=True),
                                lambda x: x.to(torch.float16, copy=True), 1),
    "a dtype as the type": (lambda x, dt: x.type(dt), lambda x: x.type(torch.float16), 1),
    "the name of a type": (lambda x, dt: x.type(dt), lambda x: x.type("torch.DoubleTensor"), 1),
    "a device as the type": (lambda x, dt: x.type(dt), lambda x: x.to("cpu"), 0),
    "a computed tensor to convert like": (lambda x, y: x.to(-y), lambda x: x.to(torch.float16), 0),
    "part of several results": (lambda x: x.chunk(2)[1], lambda x: x.chunk(2)[1], 1),
    "training dropout": (lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout(x, 0.5, True), 0),
    "nothing": (lambda x: torch.sin(x), lambda x: x, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(_OCCURRENCES))
def test_occurrences(case: str) -> None:
    wanted, program, count = _OCCURRENCES[case]
    assert len(find(symbolic_trace(program), wanted)) == count


def test_modules_match_functions() -> None:
    gm = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU(inplace=True)))
    (found,) = find(gm, lambda x, w, b: torch.relu(F.linear(x, w, b)))
    assert found["w"] == Attribute("0.weight")
    assert found.type("w").shape == (4, 4)
    assert found.root.name == "_1"


def test_another_module_of_the_same_name_does_not_match() -> None:
    gm = symbolic_trace(nn.Sequential(nn.ReLU()))
    assert len(find(gm, lambda x: torch.relu(x))) == 1
    gm.add_module("0", nn.Tanh())
    assert not find(gm, lambda x: torch.relu(x))
    assert len(find(gm, lambda x: torch.tanh(x))) == 1


@pytest.mark.parametrize(
    ("literal", "program", "operand", "count"),
    [
        (2, lambda x: x * 2.0, torch.randn(3), 1),
        (2.0, lambda x: x * 2, torch.randn(3), 1),
        (2.0, lambda x: x * 2, torch.arange(3), 0),
        (2, lambda x: x * 2.0, torch.arange(3), 0),
        (2, lambda x: x * 2, torch.arange(3), 1),
        (2, lambda x: x * 2.0, None, 0),
        (2.0, lambda x: x * 2.0, None, 1),
    ],
)
def test_integer_against_float_literals(
    literal: float, program: Any, operand: torch.Tensor | None, count: int
) -> None:
    gm = _typed(program, *([] if operand is None else [operand]))
    wanted = pattern(eval(f"lambda x: x * {literal}"))
    assert len(find(gm, wanted)) == count


def test_bindings_nodes_and_interior() -> None:
    gm = _typed(lambda a, b: torch.exp(-a) * b, _X, _X)
    (found,) = find(gm, lambda x, y: torch.exp(-x) * y)
    assert str(found["x"]) == "a"
    assert [node.name for node in found.nodes.values()] == ["neg", "exp", "mul"]
    assert [node.name for node in found.interior] == ["neg", "exp"]
    assert [node.name for node in found.outputs] == ["mul"]
    assert str(found) == "<lambda> at %mul (x=%a, y=%b)"
    assert found.type("y").shape == (3, 4)


_AXES: list[tuple[Any, Any, int]] = [
    (lambda x: x.softmax(-1), lambda x: (x.softmax(2), F.softmax(x, dim=-1), x.softmax(1)), 2),
    (lambda x: x.softmax(2), lambda x: (x.softmax(-1), x.softmax(-2)), 1),
    (lambda x: x.mean((-1, -2)), lambda x: (x.mean((2, 1)), x.mean(2), x.mean((2, 0))), 1),
    (lambda x: x.unsqueeze(-1), lambda x: (x.unsqueeze(3), x.unsqueeze(2)), 1),
    (lambda x, y: torch.stack([x, y], -1),
     lambda x: (torch.stack([x, x], 3), torch.stack([x, x], 2)), 1),
    (lambda x, y: torch.cat([x, y], -1),
     lambda x: (torch.cat([x, x], 2), torch.cat([x, x], 1)), 1),
    (lambda x: x.flatten(1), lambda x: (x.flatten(-2), x.flatten(1, 2), x.flatten(0, 1)), 2),
    (lambda x: x.transpose(-2, -1),
     lambda x: (x.transpose(2, 1), x.mT, x.transpose(-1, 1), x.transpose(0, 1)), 3),
    (lambda x: x.transpose(0, 1), lambda x: (x.transpose(1, 0), x.swapaxes(-2, 0), x.mT), 2),
    (lambda x: torch.relu(x).transpose(-2, -1) @ x,
     lambda x: x.relu().transpose(2, 1) @ x + x.relu().transpose(2, 1) @ x.relu(), 1),
    (lambda x: x.permute(0, -1, 1), lambda x: (x.permute(0, 2, 1), x.permute(0, 1, 2)), 1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(_AXES)))
def test_axes_count_from_either_end(number: int) -> None:
    wanted, program, count = _AXES[number]
    gm = _typed(program, torch.randn(2, 3, 3))
    assert len(find(gm, wanted)) == count
    calls = [n for n in gm.graph.nodes if n.op.startswith("call")]
    searched = [match_at(pattern(wanted), node) for node in calls]
    assert sum(isinstance(one, Match) for one in searched) == count


def test_axes_of_an_unknown_rank_are_those_that_are_written() -> None:
    gm = symbolic_trace(lambda x: (x.softmax(-1), x.softmax(1), x.transpose(-1, -2)))
    assert len(find(gm, lambda x: x.softmax(-1))) == 1
    assert len(find(gm, lambda x: x.transpose(-2, -1))) == 1


def test_several_results() -> None:
    gm = symbolic_trace(lambda x, y: torch.sin(x) + torch.cos(y) + torch.cos(x))
    (found,) = find(gm, lambda v: (torch.sin(v), torch.cos(v)))
    assert [node.name for node in found.outputs] == ["sin", "cos_1"]


def test_several_results_below_each_other() -> None:
    gm = symbolic_trace(lambda x: (torch.exp(-x), -x))
    assert not find(gm, lambda v: (lambda n: (n, torch.exp(n)))(torch.neg(v.abs())))
    shared = symbolic_trace(lambda x: (lambda n: (torch.exp(n), n))(-x))
    (found,) = find(shared, lambda v: (lambda n: (n, torch.exp(n)))(-v))
    assert [node.name for node in found.outputs] == ["neg", "exp"]


def _rotated(q: Any, c: Any, s: Any) -> Any:
    return q * c + torch.flip(q, [-1]) * s


# pattern, program, how often it occurs there
_SEVERAL_RESULTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "operations beside the root": (
        lambda x: (torch.relu(x) + 1, torch.tanh(x)),
        lambda x: torch.tanh(x) * (torch.relu(x) + 1), 1,
    ),
    "operations below the root": (
        lambda x: (torch.tanh(x), torch.relu(x) + 1),
        lambda x: torch.tanh(x) * (torch.relu(x) + 1), 1,
    ),
    "far from what is bound": (
        lambda x, y: (torch.exp(torch.relu(-x) + y).sum(), torch.tanh(x)),
        lambda x, y: torch.tanh(x) * torch.exp(y + torch.relu(-x)).sum(), 1,
    ),
    "another operator far from it": (
        lambda x, y: (torch.exp(torch.relu(-x) + y).sum(), torch.tanh(x)),
        lambda x, y: torch.tanh(x) * torch.exp(y + torch.sigmoid(-x)).sum(), 0,
    ),
    "through one another": (
        lambda x, y, z: (x + y, torch.sin(y * z), torch.cos(x)),
        lambda x, y, z: torch.cos(x) - torch.sin(z * y) / (y + x), 1,
    ),
    "rotary embedding": (
        lambda q, k, c, s: (_rotated(q, c, s), _rotated(k, c, s)),
        lambda q, k, c, s: _rotated(q, c, s) @ _rotated(k, c, s), 2,
    ),
    "rotations of two angles": (
        lambda q, k, c, s: (_rotated(q, c, s), _rotated(k, c, s)),
        lambda q, k, c, s: _rotated(q, c, s) @ _rotated(k, s, c), 0,
    ),
    "in a list": (
        lambda x, y: (torch.cat([-x, y]), torch.tanh(x)),
        lambda x, y: torch.cat([-x, y]) * torch.tanh(x), 1,
    ),
    "an alternative": (
        lambda x: (any_of(torch.relu, torch.sigmoid)(x) + 1, torch.tanh(x)),
        lambda x: torch.tanh(x) * (torch.sigmoid(x) + 1), 1,
    ),
    "an optional operation": (
        lambda x: (torch.exp(optional(torch.neg)(x)), torch.tanh(x)),
        lambda x, y: torch.tanh(x) * torch.exp(x) + torch.tanh(y) * torch.exp(-y), 2,
    ),
    "a name": (
        lambda x: (torch.exp(named(torch.neg(x), "n")), torch.tanh(x)),
        lambda x: torch.tanh(x) * torch.exp(-x), 1,
    ),
    "a chain": (
        lambda x: (torch.exp(repeated(torch.neg)(x)), torch.tanh(x)),
        lambda x: torch.tanh(x) * torch.exp(x.neg().neg().neg()), 1,
    ),
    "a chain that is too short": (
        lambda x: (torch.exp(repeated(torch.neg, at_least=2)(x)), torch.tanh(x)),
        lambda x: torch.tanh(x) * torch.exp(-x), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(_SEVERAL_RESULTS))
def test_results_beside_the_root(case: str) -> None:
    wanted, program, count = _SEVERAL_RESULTS[case]
    found = find(symbolic_trace(program), wanted)
    assert len(found) == count
    assert all(len(set(match.outputs)) == len(match.outputs) for match in found)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_results_does_not_decide(order: tuple[int, ...]) -> None:
    def wanted(x: Any, y: Any) -> tuple[Any, ...]:
        results = torch.tanh(x), torch.relu(x) + y, torch.exp(torch.sin(y))
        return tuple(results[place] for place in order)

    gm = symbolic_trace(lambda a, b: torch.exp(b.sin()) - torch.tanh(a) * (b + torch.relu(a)))
    (found,) = find(gm, wanted)
    names = ("tanh", "add", "exp")
    assert [node.name for node in found.outputs] == [names[place] for place in order]


def test_a_result_that_is_not_there_is_named() -> None:
    gm = symbolic_trace(lambda x: torch.tanh(x) * torch.relu(x))
    missed = match_at(pattern(lambda x: (torch.relu(x) + 1, torch.tanh(x))), gm.graph.find_nodes(
        op="call_function", target=torch.tanh)[0])  # fmt: skip
    assert isinstance(missed, Miss)
    assert (missed.expected, missed.got) == ("aten.add beside the root", "no such node")


def test_commute_can_be_switched_off() -> None:
    gm = symbolic_trace(lambda x, y: y * torch.sigmoid(x))
    wanted = pattern(lambda x, y: torch.sigmoid(x) * y)
    assert len(find(gm, wanted)) == 1
    assert not find(gm, wanted, commute=False)


def test_a_capture_takes_back_its_choice() -> None:
    """The first order binds x to the wrong operand; the second one fits."""
    gm = symbolic_trace(lambda a, b: (b + a) * torch.exp(b))
    (found,) = find(gm, lambda x, y: (x + y) * torch.exp(x))
    assert (str(found["x"]), str(found["y"])) == ("b", "a")


def _sum_of(count: int) -> Callable[..., Any]:
    names = [f"x{index}" for index in range(count)]
    terms = " + ".join(f"torch.exp({name})" for name in names)
    return eval(f"lambda {', '.join(names)}: {terms}", {"torch": torch})


def test_orders_do_not_cost_exponentially() -> None:
    """A chain of n sums has 2^n orders; operators alone tell which can fit."""
    steps = {}
    for count in (8, 16, 32):
        gm = symbolic_trace(_sum_of(count))
        root = list(gm.graph.nodes)[-2]
        search = Search(pattern(_sum_of(count)), root, True)
        assert isinstance(search.run(), Match)
        steps[count] = search.steps
    assert steps[32] <= 4.5 * steps[8]


def test_orders_do_not_cost_exponentially_where_nothing_fits() -> None:
    gm = symbolic_trace(_sum_of(14))
    next(iter(gm.graph.find_nodes(op="call_function", target=torch.exp))).target = torch.sin
    search = Search(pattern(_sum_of(14)), list(gm.graph.nodes)[-2], True)
    assert isinstance(search.run(), Miss)
    assert search.steps <= 200


def test_a_miss_is_a_value_that_tells_what_stopped_it() -> None:
    gm = symbolic_trace(lambda a: torch.exp(torch.sin(a)) * 2)
    root = list(gm.graph.nodes)[-2]
    missed = match_at(pattern(lambda x: torch.exp(torch.cos(x)) * 2), root)
    assert isinstance(missed, Miss)
    assert (missed.matched, missed.expected, missed.got) == (2, "aten.cos", "aten.sin")
    assert missed.node is not None and missed.node.name == "sin"
    assert missed.pattern_source.startswith("test_match_results.py:")


@pytest.mark.parametrize(
    "quotient",
    [
        lambda x, y: torch.div(x, y, rounding_mode=None),
        lambda x, y: torch.divide(x, y, rounding_mode=None),
        lambda x, y: x.div(y, rounding_mode=None),
        lambda x, y: torch.ops.aten.div.Tensor_mode(x, y, rounding_mode=None),
    ],
)
def test_a_division_that_asks_for_no_rounding_is_a_division(quotient: Any) -> None:
    gm = symbolic_trace(quotient)
    assert len(find(gm, lambda x, y: x / y)) == 1
    assert len(find(gm, lambda x, y: torch.div(x, y, rounding_mode=None))) == 1
    assert not find(gm, lambda x, y: torch.div(x, y, rounding_mode="floor"))


def test_a_division_that_rounds_is_none() -> None:
    gm = symbolic_trace(lambda x, y: torch.div(x, y, rounding_mode="floor"))
    assert not find(gm, lambda x, y: x / y)
