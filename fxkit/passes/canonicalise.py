"""Bring a graph into the form that later passes expect, without changing a number."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.patterns.rules import RULES


@dataclass(frozen=True)
class Canonicalise(Pass):
    """Apply every rule that gives the very same numbers, until none matches.

    A result that is read by its name is taken by its place, before that.

    Rewrites:
        %a = aten.mul(%x, 1); return aten.to(%a, f32)  →  return %x
        %v = %max.values                               →  %v = %max[0]
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Run the exact rules to their fixpoint."""
        _take_by_place(edit)
        exact = [rule for _, rule in RULES.items() if rule.exact]
        context.rewrite(edit, exact)


def _take_by_place(edit: EditSession) -> None:
    """Spell `x.max(0).values` as `x.max(0)[0]`."""
    for node in edit.graph.find_nodes(op="call_function", target=getattr):
        call = resolve(node)
        if call is None or call.name != "python.getitem":
            continue
        taken = edit.call(operator.getitem, *call.arguments.values(), before=node)
        known = type_of(node)
        edit.replace(node, taken)
        if known is not None:
            set_type(taken, known)
