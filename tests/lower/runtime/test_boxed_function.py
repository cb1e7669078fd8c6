"""Graphs as functions of Python that let go of their values."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from fxkit.lower.runtime.boxed_function import boxed_function


class Pair(NamedTuple):
    left: Any
    right: Any


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])


def graph_of(*inputs: str) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph(Net())
    return graph, [graph.placeholder(name) for name in inputs]


def test_every_kind_of_node_and_operand() -> None:
    net, x = Net(), torch.randn(5, 3)
    graph, (given,) = graph_of("x")
    weight = graph.get_attr("layers.1.weight")
    taken = graph.call_function(lambda t, at: t[:, at], (weight, slice(1, None, 2)))
    hidden = graph.call_module("layers.0", (given,))
    turned = graph.call_method("transpose", (hidden, 0), {"dim1": 1})
    part = graph.call_function(lambda t, at: t[at], (turned, (slice(1, None, 2), slice(2))))
    both = graph.call_function(lambda pair: pair.left @ pair.right, (Pair(taken, part),))
    made = graph.call_function(lambda t, **options: (t, options), (both,), {"from": [1.5, both]})
    graph.output({"made": made, "more": [hidden, (None, torch.float32, "text")]})
    found = boxed_function(graph)(net, [x])
    first = net.layers[0](x)
    expected = net.layers[1].weight[:, 1::2] @ first.T[1::2, :2]
    torch.testing.assert_close(found["made"][0], expected)
    assert found["made"][1]["from"][0] == 1.5
    assert found["more"][1] == (None, torch.float32, "text")
    torch.testing.assert_close(found["more"][0], first)


def test_values_are_let_go_of_after_their_last_use() -> None:
    alive: list[list[bool]] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def step(value: torch.Tensor) -> torch.Tensor:
        alive.append([ref() is not None for ref in seen])
        result = value + 1
        seen.append(weakref.ref(result))
        return result

    graph, (given,) = graph_of("x")
    first = graph.call_function(step, (given,))
    second = graph.call_function(step, (first,))
    graph.call_function(step, (second,))
    graph.output((graph.call_function(step, (second,)),))
    box = [torch.zeros(2)]
    seen.append(weakref.ref(box[0]))
    (result,) = boxed_function(graph)(None, box)
    assert not box
    assert alive == [
        [True],
        [False, True],
        [False, False, True],
        [False, False, True, False],
    ]
    torch.testing.assert_close(result, torch.full((2,), 3.0))


def test_each_call_gets_lists_of_its_own() -> None:
    graph, _ = graph_of()
    graph.output(graph.call_function(lambda items: items, ([1, 2],)))
    run = boxed_function(graph)
    run(None, []).append(3)
    assert run(None, []) == [1, 2]
