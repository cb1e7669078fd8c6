"""Remove what nobody needs, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from fxkit.analysis.effects import effects_of
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext


@dataclass(frozen=True)
class DeadCodeElimination(Pass):
    """Erase nodes whose value nobody uses and that do nothing else.

    A node that writes to memory, draws random numbers, or of which nothing is known stays:
    printing, assertions, in-place operators and `out=` are kept. Inputs stay, since they are the
    signature.

    Rewrites:
        %a = aten.relu(%x); return %x  →  return %x
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes from the last to the first. Cost: linear in the edges."""
        for node in reversed(list(edit.graph.nodes)):
            if node.op in ("placeholder", "output") or node.users:
                continue
            if effects_of(node).is_pure:
                edit.erase(node)
