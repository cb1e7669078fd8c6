"""Compute each value once."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.analysis.moves import Moves, merging_key
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
        self.first: dict[Hashable, fx.Node] = {}

    @functools.cached_property
    def moves(self) -> Moves:
        """What may stand where: only asked of equal nodes, so before any has changed."""
        return Moves(self.edit.graph)

    def visit(self, node: fx.Node) -> None:
        if effects_of(node).is_global:
            self.first.clear()
            return
        key = merging_key(node)
        if key is None:
            return
        earlier = self.first.setdefault(key, node)
        if earlier is node:
            return
        verdict = self.moves.may_share(earlier, node)
        if verdict:
            with self.edit.on_behalf_of([earlier, node], "common_subexpression_elimination"):
                self.edit.replace(node, earlier)
            return
        self.first[key] = node
        self.context.notes.append(f"%{node.name} is not %{earlier.name}: {verdict.reason}")
