"""Stages: few, convex, in an order that can run."""

from __future__ import annotations

import operator

import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import fx

from fxkit.analysis.effect_edges import effect_predecessors
from fxkit.passes.partitioning.stages import connected_pieces, labelled_stages, two_kinds_of_stages
from tests.patterns.random_graphs import GRAPHS
from tests.sampling import examples

_QUICK = examples(40, of=120, derandomize=True, suppress_health_check=list(HealthCheck))


def body(graph):
    return [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def assert_can_run_in_order(stages, effects):
    place = {node: index for index, nodes in enumerate(stages) for node in nodes}
    for node, index in place.items():
        for earlier in (*node.all_input_nodes, *effects.get(node, ())):
            assert place.get(earlier, -1) <= index, (earlier, node)


@_QUICK
@given(gm=GRAPHS, chosen=st.integers(0, 2**30))
def test_stages_of_two_kinds_are_convex_and_cover_what_is_inside(gm, chosen):
    nodes = body(gm.graph)
    effects = effect_predecessors(gm.graph)
    inside = {n for i, n in enumerate(nodes) if chosen >> (i % 30) & 1}
    stages = two_kinds_of_stages(nodes, effects, is_inside=inside.__contains__)
    assert sorted(n.name for s in stages for n in s) == sorted(n.name for n in inside)
    place = {node: index for index, stage in enumerate(stages) for node in stage}
    left: dict[fx.Node, set[int]] = {}
    for node in nodes:
        left[node] = set()
        for earlier in (*node.all_input_nodes, *effects.get(node, ())):
            left[node] |= left.get(earlier, set())
            if earlier in place and place[earlier] != place.get(node):
                left[node].add(place[earlier])
        assert place.get(node) not in left[node], "a path left the stage and came back"


@_QUICK
@given(gm=GRAPHS, chosen=st.integers(0, 3**18), count=st.integers(1, 3))
def test_labelled_stages_can_run_one_after_another(gm, chosen, count):
    nodes = body(gm.graph)
    effects = effect_predecessors(gm.graph)
    labels = {n: chosen // 3 ** (i % 18) % 3 % count for i, n in enumerate(nodes) if i % 4}
    stages = labelled_stages(nodes, effects, labels)
    assert_can_run_in_order([found for _, found in stages], effects)
    for label, found in stages:
        assert all(labels.get(node, label) == label for node in found)
    assert sum(len(found) for _, found in stages) == len(nodes)


def chain(*targets):
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_function(target, (value,))
    graph.output(value)
    return graph


def test_branches_share_a_stage_and_are_split_into_pieces_on_request():
    graph = fx.Graph()
    x = graph.placeholder("x")
    left = graph.call_function(torch.exp, (x,))
    right = graph.call_function(torch.sin, (x,))
    graph.output((left, right))
    (stage,) = two_kinds_of_stages(body(graph), {}, is_inside=lambda n: True)
    assert stage == [left, right]
    assert connected_pieces(stage, {}) == [[left], [right]]
    assert connected_pieces(stage, {right: [left]}) == [[left, right]]


def test_as_many_stages_as_a_path_has_turns():
    graph = chain(torch.exp, torch.sin, torch.exp, torch.sin, torch.exp, torch.exp)
    stages = two_kinds_of_stages(body(graph), {}, is_inside=lambda n: n.target is torch.exp)
    assert [[n.name for n in stage] for stage in stages] == [["exp"], ["exp_1"], ["exp_2", "exp_3"]]


def test_what_comes_from_parameters_alone_is_computed_where_it_is_wanted():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.get_attr("y")
    early = graph.call_function(torch.exp, (graph.call_function(torch.neg, (y,)),))
    a = graph.call_function(torch.exp, (x,))
    b = graph.call_function(torch.sin, (a,))
    c = graph.call_function(operator.add, (b, early))
    graph.output(c)
    stages = two_kinds_of_stages(body(graph), {}, is_inside=lambda n: n is not b)
    assert stages == [[a], [*early.all_input_nodes, early, c]]


def test_a_label_that_first_shows_up_before_what_it_waits_for_gets_one_stage():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a1 = graph.call_function(torch.exp, (x,))
    b = graph.call_function(torch.sin, (x,))
    a2 = graph.call_function(operator.add, (a1, b))
    graph.output(a2)
    stages = labelled_stages(body(graph), {}, {a1: "a", b: "b", a2: "a"})
    assert stages == [("b", [b]), ("a", [a1, a2])]


def test_labels_that_take_turns_get_several_stages():
    graph = chain(torch.exp, torch.sin, torch.cos)
    one, two, three = body(graph)
    stages = labelled_stages(body(graph), {}, {one: 0, two: 1, three: 0})
    assert stages == [(0, [one]), (1, [two]), (0, [three])]


def test_without_labels_all_is_one_stage():
    graph = chain(torch.exp, torch.sin)
    assert [len(found) for _, found in labelled_stages(body(graph), {}, {})] == [2]
