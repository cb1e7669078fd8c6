"""Find operators that were spelled out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.patterns.engine import rewrite_in
from fxkit.patterns.rules import RULES


@dataclass(frozen=True)
class Recompose(Pass):
    """Apply the rules whose result is as accurate but may round otherwise.

    Rewrites:
        %s = aten.sigmoid(%x); return aten.mul(%x, %s)  →  return aten.silu(%x)
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Run the rules that may round otherwise to their fixpoint."""
        inexact = [rule for _, rule in RULES.items() if not rule.exact]
        context.reports.append(rewrite_in(edit, inexact))
