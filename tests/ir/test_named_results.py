"""A result read by its name is one taken by its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import fxkit
from fxkit.analysis.effects import effects_of
from fxkit.ir.named_results import result_names
from fxkit.ir.op import operator_of, resolve


def test_names_are_in_the_order_of_the_schemas() -> None:
    compared = 0
    for packet in dir(torch.return_types):
        names = result_names(packet)
        overloads = getattr(torch.ops.aten, packet, None)
        if not names or overloads is None:
            continue
        for overload in overloads.overloads():
            given = tuple(r.name for r in getattr(overloads, overload)._schema.returns)
            if len(given) > 1 and all(given):
                assert names == given, f"{packet}.{overload}"
                compared += 1
    assert compared > 50


def _read(function: Any, name: str, *args: Any) -> fx.Node:
    graph = fx.Graph()
    several = graph.call_function(function, (graph.placeholder("x"), *args))
    return graph.call_function(getattr, (several, name))


@pytest.mark.parametrize(
    ("function", "args", "name", "place"),
    [
        (torch.max, (0,), "values", 0), (torch.topk, (2,), "indices", 1),
        (torch.aminmax, (), "max", 1), (torch.linalg.qr, (), "R", 1),
        (torch.linalg.svd, (), "S", 1),
        (torch.svd, (), "V", 2), (torch.frexp, (), "exponent", 1),
        (torch.linalg.slogdet, (), "logabsdet", 1), (torch.ops.aten.sort.stable, (), "indices", 1),
    ],
)  # fmt: skip
def test_a_name_is_a_place(function: Any, args: tuple[Any, ...], name: str, place: int) -> None:
    node = _read(function, name, *args)
    call = resolve(node)
    assert call is not None and operator_of(node) is call.operator
    assert call.name == "python.getitem" and call.arguments == {"0": node.args[0], "1": place}
    assert effects_of(node).is_pure


def test_the_operator_decides() -> None:
    for function, args, name in (
        (torch.max, (), "values"), (torch.relu, (), "values"), (torch.max, (0,), "count"),
        (torch.var_mean, (), "values"),
    ):  # fmt: skip
        call = resolve(_read(function, name, *args))
        assert call is not None and call.name == "python.getattr"
    node = _read(torch.max, "indices", 0)
    assert operator_of(node) is not None
    node.all_input_nodes[0].target = torch.relu
    call = resolve(node)
    assert call is not None and call.name == "python.getattr" == str(operator_of(node))


def test_patterns_match_either_spelling() -> None:
    spellings = (lambda x: torch.topk(x, 3).values, lambda x: x.topk(3)[0])
    for program in spellings:
        for wanted in spellings:
            assert len(fxkit.find(fxkit.symbolic_trace(program), wanted)) == 1
        assert not fxkit.find(fxkit.symbolic_trace(program), lambda x: x.topk(3).indices)
