"""Compute each value once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import effects_of
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext


@dataclass(frozen=True)
class CommonSubexpressionElimination(Pass):
    """Let equal nodes share one value.

    Two nodes are equal when they call the same operator, in whatever spelling, with the same
    arguments. They are merged only when both are pure, nothing wrote to their operands in between,
    no mode changed in between, and nobody can see that two tensors became one: neither is written
    to, and at most one of them leaves the graph.

    Rewrites:
        %a = aten.relu(%x); %b = aten.relu(%x); return aten.add(%a, %b)
            →  %a = aten.relu(%x); return aten.add(%a, %a)
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges."""
        merger = _Merger(edit, context)
        for node in list(edit.graph.nodes):
            merger.visit(node)


class _Merger:
    def __init__(self, edit: EditSession, context: PassContext) -> None:
        self.edit = edit
        self.context = context
        self.order = EffectOrder(edit.graph)
        self.first: dict[Hashable, fx.Node] = {}
        self.attributes: dict[str, fx.Node] = {}
        output = next(reversed(edit.graph.nodes))
        outside = [n for n in edit.graph.nodes if n.op in ("placeholder", "get_attr")]
        root = self.order.aliases.root
        self.shared = {root(n) for n in (*outside, *output.all_input_nodes)}

    def visit(self, node: fx.Node) -> None:
        if effects_of(node).is_global:
            self.first.clear()
            return
        key = _key(node)
        if key is None:
            return
        earlier = self.first.setdefault(key, node)
        if earlier is node:
            return
        reason = self._refusal(earlier, node)
        if reason is None:
            with self.edit.on_behalf_of([earlier, node], "common_subexpression_elimination"):
                self.edit.replace(node, earlier)
            return
        self.first[key] = node
        self.context.notes.append(f"%{node.name} is not %{earlier.name}: {reason}")

    def _refusal(self, earlier: fx.Node, later: fx.Node) -> str | None:
        for operand in (*later.all_input_nodes, earlier):
            writer = self.order.written_between(operand, earlier, later)
            if writer is not None:
                return f"%{writer.name} may write to %{operand.name} in between"
        if earlier.op == "get_attr":
            return None
        aliases = self.order.aliases
        if aliases.may_alias(earlier, later):
            return None
        for node in (earlier, later):
            if aliases.is_written(node):
                return f"%{aliases.writers(node)[0].name} writes to one of them"
        if aliases.root(earlier) in self.shared and aliases.root(later) in self.shared:
            return "both leave the graph, and the caller could see that they are one"
        return None


def _key(node: fx.Node) -> Hashable | None:
    """Return what equal nodes have in common; None when the node may not be merged."""
    if node.op == "get_attr":
        return ("get_attr", node.target)
    call = resolve(node)
    if call is None or not effects_of(node).is_pure:
        return None
    try:
        key = (call.name, call.operator.overload, _frozen(dict(call.arguments)))
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Hashable:
    """Return a hashable form in which equal arguments are equal, and `1`, `1.0`, `True` are not."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, dict):
        return tuple((key, _frozen(v)) for key, v in value.items())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(v) for v in value))
    if isinstance(value, slice):
        return ("slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)
