"""Copies of graphs and of modules with them, which share parameters, buffers and submodules."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxkit.torch_adapters.fx_graphs import codegen_of

# Where a module that takes nested arguments keeps their structure.
SPECS = ("_in_spec", "_out_spec")


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a module with a graph of its own that shares all attributes with the given one."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, val_map={}, return_output_node=True)
    value, original = output if isinstance(output, tuple) else (None, None)
    graph.output(value, getattr(original, "type", None))
    graph.set_codegen(codegen_of(gm.graph))
    copied = fx.GraphModule(gm, graph, gm.__class__.__name__)
    copied.training = gm.training
    for key in SPECS:
        if hasattr(gm, key):
            setattr(copied, key, getattr(gm, key))
    return copied


def copy_nodes(nodes: Iterable[fx.Node], graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    """Append copies of nodes, with their metadata, to another graph.

    Args:
        nodes: The nodes, in order.
        graph: The graph that gets the copies.
        copies: Node → its copy; has those of operands that are not among `nodes`, gets the others.
    """
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
