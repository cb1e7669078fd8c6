"""Edges of effect: every pair that may not change places is on a path, and no other is kept."""

from __future__ import annotations

import itertools
import operator

import torch
from hypothesis import HealthCheck, given
from torch import fx

import fxkit
from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effect_edges import effect_predecessors
from tests.patterns.random_graphs import GRAPHS
from tests.sampling import examples


def reachable(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return all that comes before each node, by operand or by effect."""
    effects = effect_predecessors(graph)
    before: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        near = {*node.all_input_nodes, *effects.get(node, ())}
        before[node] = near.union(*(before[n] for n in near))
    return before


@examples(50, of=150, derandomize=True, suppress_health_check=list(HealthCheck))
@given(gm=GRAPHS)
def test_pairs_that_may_not_swap_are_ordered(gm):
    order = EffectOrder(gm.graph)
    before = reachable(gm.graph)
    body = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    for first, second in itertools.combinations(body, 2):
        if not order.may_swap(first, second):
            assert first in before[second], (first, second)


def edges_of(function):
    gm = fxkit.symbolic_trace(function)
    found = effect_predecessors(gm.graph)
    return {node.name: [n.name for n in before] for node, before in found.items()}


def test_pure_nodes_have_none():
    assert edges_of(lambda x, y: (torch.relu(x) + y).exp()) == {}


def test_a_write_stays_between_reads():
    def f(x, y):
        a = torch.exp(x)
        x.add_(1)
        return a, torch.sin(x), torch.cos(y)

    assert edges_of(f) == {"add_": ["exp"], "sin": ["add_"]}


def test_random_numbers_are_drawn_in_order_and_nothing_else_waits_for_them():
    def f(x):
        return torch.rand_like(x), torch.exp(x), torch.randn_like(x)

    assert edges_of(f) == {"randn_like": ["rand_like"]}


@fx.wrap
def unknown(x):
    return x


def test_nothing_passes_a_call_of_which_nothing_is_known():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.exp, (x,))
    b = graph.call_function(unknown, (x,))
    c = graph.call_function(torch.sin, (x,))
    graph.output((a, b, c))
    gm = fx.GraphModule({}, graph)
    assert effect_predecessors(gm.graph) == {b: [a], c: [b]}


def test_edges_are_linear_in_the_graph():
    graph = fx.Graph()
    x = value = graph.placeholder("x")
    for index in range(400):
        value = graph.call_function((torch.exp, operator.neg)[index % 2], (value,))
        if index % 3 == 0:
            graph.call_method("add_", (x, value))
        if index % 50 == 0:
            graph.call_function(unknown, (x,))
    graph.output(value)
    gm = fx.GraphModule({}, graph)
    edges = sum(len(before) for before in effect_predecessors(gm.graph).values())
    assert edges <= 4 * len(gm.graph.nodes)
