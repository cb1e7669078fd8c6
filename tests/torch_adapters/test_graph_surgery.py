"""Nodes are made and erased as torch.fx's own `Graph` does it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from fxkit.torch_adapters.graph_surgery import erase_node, insert_node, revive_node


def _graph() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))
    return graph


def _state(graph: fx.Graph) -> Any:
    """Everything that torch.fx keeps beside the nodes, by names."""
    names = graph._graph_namespace
    return (
        str(graph),
        len(graph.nodes),
        {n.name: [u.name for u in n.users] for n in graph.nodes},
        {key: [n.name for n in found] for key, found in
         graph._find_nodes_lookup_table.table.items() if found},
        {node.name: name for node, name in names._obj_to_name.items() if not node._erased},
        set(names._used_names),
        dict(names._base_count),
    )  # fmt: skip


def test_a_node_is_made_as_the_graph_makes_it() -> None:
    ours, theirs = _graph(), _graph()
    for graph in (ours, theirs):
        x, relu, _ = graph.nodes
        kwargs = {"alpha": 2}
        if graph is ours:
            insert_node(relu, "call_function", torch.add, (x, [x, 1]), kwargs, "relu")
            continue
        with graph.inserting_before(relu):
            graph.create_node("call_function", torch.add, (x, [x, 1]), kwargs, name="relu")
    assert _state(ours) == _state(theirs)
    made = list(ours.nodes)[1]
    assert made.name == "relu_1"
    assert type(made.args[1]) is type(list(theirs.nodes)[1].args[1])


def test_a_node_is_erased_as_the_graph_erases_it_and_comes_back() -> None:
    ours, theirs = _graph(), _graph()
    for graph in (ours, theirs):
        relu, output = list(graph.nodes)[1:]
        output.args = (None,)
        before = _state(graph)
        args = relu.args
        if graph is ours:
            erase_node(relu)
        else:
            graph.erase_node(relu)
    assert _state(ours) == _state(theirs)
    assert relu._erased
    ours_relu = next(n for n in ours._graph_namespace._obj_to_name if n._erased)
    x, output = ours.nodes
    revive_node(ours_relu, output, (x,), {})
    assert _state(ours) == before
    assert len(args) == 1
    copy.deepcopy(ours).lint()


def test_the_owners_hooks_are_called() -> None:
    gm = fx.GraphModule(torch.nn.Module(), _graph())
    seen: list[str] = []
    gm._register_create_node_hook(lambda node: seen.append(f"create {node.name}"))
    gm._register_erase_node_hook(lambda node: seen.append(f"erase {node.name}"))
    x, relu, _ = gm.graph.nodes
    erase_node(insert_node(relu, "call_function", torch.abs, (x,), {}, "abs_1"))
    assert seen == ["create abs_1", "erase abs_1"]
