"""Find operators that were spelled out by hand."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import fx

from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.options import check_among
from fxkit.patterns.reasons import explain
from fxkit.patterns.rewrite_report import RewriteReport
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.rules import RULES, rules_in


@dataclass(frozen=True)
class Recompose(Pass):
    """Apply the rules whose result is as accurate but may round otherwise.

    Attention that is left as it was spelled is noted, with what stood in the way: weights that
    somebody else takes too, dropout in training, a mask that may hide every key.

    Attributes:
        only: The rules to apply, by name, or by the name of the file that has them or its first
            word: `("attention", "linear")`. All when it is empty.
        leave: The rules to leave out, by the same names.

    Rewrites:
        %s = aten.sigmoid(%x); return aten.mul(%x, %s)  →  return aten.silu(%x)
    """

    only: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()

    numerics: ClassVar[str] = "close"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        for option in ("only", "leave"):
            if getattr(self, option):
                check_among(self, option, _names())

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Run the rules that may round otherwise to their fixpoint."""
        report = context.rewrite(edit, self._rules())
        if _ATTENTION in self.leave:
            return
        left = [node for node in edit.graph.nodes if _weighs_by_softmax(node)]
        rules = [rule for rule in _of_attention() if rule.name not in context.left_out]
        for node in left[:_MOST_NOTES] if rules else ():
            reason = _reason(edit, node, report, rules)
            context.notes.append(f"attention at %{node.name} stays: {reason}")
        if len(left) > _MOST_NOTES:
            context.notes.append(f"attention stays at {len(left) - _MOST_NOTES} more places")

    def _rules(self) -> list[Rule]:
        only, leave = {*(self.only or _names())}, {*self.leave}
        return [r for r in _inexact() if _names_of(r) & only and not _names_of(r) & leave]


_ATTENTION = "attention"


def _inexact() -> list[Rule]:
    return [rule for _, rule in RULES.items() if not rule.exact]


def _of_attention() -> list[Rule]:
    """Return the rules that find whole attention, by a product at the root."""
    return [*rules_in("attention"), *rules_in("attention_of_matrices")]


@functools.cache
def _names_of(rule: Rule) -> frozenset[str]:
    """Return by what a rule can be chosen: its name, that of its file, and the file's subject."""
    file = Path(rule.file).stem
    return frozenset((rule.name, file, file.partition("_")[0]))


def _names() -> list[str]:
    return sorted(set().union(*map(_names_of, _inexact())))


# What may stand between a softmax and the product that it weighs.
_PASSING = ("aten.dropout", "aten.to", "aten.type_as", "aten.contiguous", "aten.clone")
_MOST_NOTES = 8


def _weighs_by_softmax(node: fx.Node) -> bool:
    """Tell whether a node is a product of matrices of which the first is a softmax."""
    call = resolve(node)
    if call is None or call.name not in ("aten.matmul", "aten.bmm"):
        return False
    weights = call.arguments["self"]
    for _ in range(len(_PASSING)):
        made = resolve(weights) if isinstance(weights, fx.Node) else None
        if made is None or made.name not in _PASSING:
            break
        weights = made.arguments.get("self", made.arguments.get("input"))
    made = resolve(weights) if isinstance(weights, fx.Node) else None
    return made is not None and made.name == "aten.softmax"


def _reason(edit: EditSession, node: fx.Node, report: RewriteReport, attention: list[Rule]) -> str:
    """Return why attention at a node was left: a rule's refusal, or where the nearest one ended."""
    names = {rule.name for rule in attention}
    refused = [why for rule, root, why in report.refusals if root == node.name and rule in names]
    if refused:
        return refused[0]
    tried = [explain(edit.gm, rule, at=node.name) for rule in attention]
    nearest = max(tried, key=lambda told: 0 if told.miss is None else told.miss.matched)
    miss = nearest.miss
    if miss is None:
        return nearest.reason.splitlines()[0]
    return f"expected {miss.expected}, got {miss.got}"
