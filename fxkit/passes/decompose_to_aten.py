"""Spell every call as one of ATen's overloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.decomposition.aten_spelling import AtenSpelling


@dataclass(frozen=True)
class DecomposeToAten(Pass):
    """Turn functions, methods, operators and modules into calls of ATen's overloads.

    What has an overload of its own keeps its meaning and place: a linear layer stays one. Indexing
    becomes slices, selections and `index`, assigning to an index a `copy_` or `index_put_`. Modules
    give up their parameters, which become reads. Functions of torch without one operator, such as
    `F.interpolate`, become the operators that they call for the recorded types. Plain Python on
    numbers, shapes and tuples stays, and so does what nothing is known of, with a note.

    Rewrites:
        return self.fc(%x)[0]
            →  %w = self.fc.weight; %b = self.fc.bias
               %y = torch.ops.aten.linear.default(%x, %w, %b)
               return torch.ops.aten.select.int(%y, 0, 0)
    """

    requires: ClassVar[tuple[str, ...]] = ("shapes_known",)
    ensures: ClassVar[tuple[str, ...]] = ("aten",)
    preserves: ClassVar[tuple[str, ...]] = ("functional", "shapes_known")

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges."""
        spelling = AtenSpelling(edit, context)
        for node in list(edit.graph.nodes):
            spelling.visit(node)
