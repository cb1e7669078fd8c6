"""Bring a graph into the form that later passes expect, without changing a number."""

from __future__ import annotations

from dataclasses import dataclass

from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.patterns.engine import rewrite_in
from fxkit.patterns.rules import RULES


@dataclass(frozen=True)
class Canonicalise(Pass):
    """Apply every rule that gives the very same numbers, until none matches.

    Rewrites:
        %a = aten.mul(%x, 1); return aten.to(%a, f32)  →  return %x
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Run the exact rules to their fixpoint."""
        exact = [rule for _, rule in RULES.items() if rule.exact]
        context.reports.append(rewrite_in(edit, exact))
