"""A functional graph as a module: with its parameters, and with what happens around the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxkit.tracing.functional.flat_program import TAIL, VALUE, FlatProgram


def as_module(forward: fx.GraphModule, root: fx.GraphModule, flat: FlatProgram) -> fx.GraphModule:
    """Return a module that does in one graph what a functional program does around its own.

    Args:
        forward: The functional graph, over the arguments and then parameters and buffers.
        root: The captured graph module, which has those.
        flat: What is done around the functional graph.
    """
    graph = fx.Graph()
    inputs = _inputs(graph, forward, flat)
    computed = list(_inlined(graph, forward.graph, inputs))
    count = len(flat.values)
    values, seen = computed[:count], computed[: count + len(flat.read)]
    written = computed[len(seen) : len(seen) + len(flat.mutated)]
    if flat.checks is not None:
        _inlined(graph, _graph_of(flat.checks), [*inputs, *seen])
    if flat.reshape is not None:
        _inlined(graph, _graph_of(flat.reshape), inputs)
    tail = [] if flat.tail is None else _inlined(graph, _graph_of(flat.tail), [*inputs, *values])
    for position, value in zip(flat.mutated, written, strict=True):
        graph.call_function(torch.ops.aten.copy_.default, (inputs[position], value))
    sources = {VALUE: values, TAIL: tail}
    results = tuple(sources.get(r.kind, inputs)[r.index] for r in flat.results)
    graph.output(results[0] if flat.is_single else results)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    return fx.GraphModule(root, graph)


def _inputs(graph: fx.Graph, forward: fx.GraphModule, flat: FlatProgram) -> list[fx.Node]:
    """Take the arguments as inputs; read parameters and buffers."""
    placeholders = list(forward.graph.find_nodes(op="placeholder"))
    first = len(placeholders) - len(flat.attributes)
    made = [graph.node_copy(node) for node in placeholders[:first]]
    for node, name in zip(placeholders[first:], flat.attributes, strict=True):
        read = graph.get_attr(name)
        read.meta.update(node.meta)
        made.append(read)
    return made


def _inlined(graph: fx.Graph, called: fx.Graph, inputs: list[fx.Node]) -> Any:
    """Copy a graph into another one; return what it gives."""
    placeholders = called.find_nodes(op="placeholder")
    return graph.graph_copy(called, dict(zip(placeholders, inputs, strict=True)))


def _graph_of(run: Any) -> fx.Graph:
    """Return the graph of a module of which `run` is the `forward`."""
    return run.__self__.graph
