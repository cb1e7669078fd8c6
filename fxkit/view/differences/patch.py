"""A difference as something that can be applied: the graph before becomes the graph after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.errors import RewriteError
from fxkit.ir.attributes import ABSENT, find_attribute
from fxkit.torch_adapters.fx_graphs import codegen_of
from fxkit.torch_adapters.fx_nodes import rename_node


@dataclass(frozen=True)
class Patch:
    """What has to be done to a graph.

    Attributes:
        order: The names of the nodes after, in order.
        matched: Name after → name before, for the nodes that are in both.
        made: The nodes after that are not as they were; the others are taken from the graph before.
        rerouted: For a node that is as it was, but for an operand that was replaced: name of the
            operand before → name after.
        attributes: Values of the attributes that the made nodes refer to.
    """

    order: tuple[str, ...]
    matched: Mapping[str, str]
    made: Mapping[str, fx.Node]
    rerouted: Mapping[str, Mapping[str, str]]
    attributes: Mapping[str, Any]

    def apply(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return the graph after; `gm` is left as it is.

        Raises:
            RewriteError: The graph is not the one that the difference begins at.
        """
        before = {node.name: node for node in gm.graph.nodes}
        missing = sorted(set(self.matched.values()) - before.keys())
        if missing:
            raise RewriteError(
                f"expected the graph that the difference begins at, got one without %{missing[0]}",
                hint="apply it to a copy of the first argument of fxkit.diff",
            )
        after = {name: after for after, name in self.matched.items()}
        graph = fx.Graph()
        graph.set_codegen(codegen_of(gm.graph))
        copied: dict[str, fx.Node] = {}
        for name in self.order:
            if name in self.made:
                node = self.made[name]
                names = {operand.name: operand.name for operand in node.all_input_nodes}
            else:
                node = before[self.matched[name]]
                names = {**after, **self.rerouted.get(name, {})}
            copied[name] = _copy(graph, node, name, names, copied)
        return _module(gm, graph, self.attributes)


def _copy(
    graph: fx.Graph,
    node: fx.Node,
    name: str,
    names: Mapping[str, str],
    copied: Mapping[str, fx.Node],
) -> fx.Node:
    def operand(old: fx.Node) -> fx.Node:
        return copied[names[old.name]]

    args, kwargs = map_arg((node.args, node.kwargs), operand)
    made = graph.create_node(node.op, node.target, args, kwargs, name)
    if made.name != name:
        rename_node(made, name)
    made.meta = dict(node.meta)
    return made


def _module(gm: fx.GraphModule, graph: fx.Graph, more: Mapping[str, Any]) -> fx.GraphModule:
    root = {}
    for node in graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        found = find_attribute(gm, str(node.target))
        root[str(node.target)] = more[str(node.target)] if found is ABSENT else found
    result = fx.GraphModule(root, graph, type(gm).__name__)
    return result.train(gm.training)


def attributes_of(gm: torch.nn.Module, nodes: Mapping[str, fx.Node]) -> dict[str, Any]:
    """Return the values of the attributes that nodes refer to, by name."""
    targets = [str(n.target) for n in nodes.values() if n.op in ("get_attr", "call_module")]
    return {target: find_attribute(gm, target) for target in targets}
