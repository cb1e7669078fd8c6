"""Why a rule did not apply, or a pattern does not occur: the nearest miss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxkit.errors import FxkitError
from fxkit.ir.graph_arguments import graph_module_of
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.program_changes import GraphProgram
from fxkit.patterns.match_results import Miss
from fxkit.patterns.matcher import match_at
from fxkit.patterns.pattern_nodes import Pattern
from fxkit.patterns.refusals import refusal
from fxkit.patterns.rewriting import Rule, check_rules
from fxkit.patterns.safety import Safety
from fxkit.patterns.templates import pattern


@dataclass(frozen=True)
class Explanation:
    """What stands between a rule, or a pattern, and a node.

    Attributes:
        rule: Name of the rule or pattern.
        applies: Whether the rule would be applied; of a pattern, whether it matches.
        node: Name of the node where its root was looked for.
        reason: What stopped it, as text; where it applies, what it matched.
        miss: The structural miss, when that is the reason.
        is_rule: Whether a rule was asked for, and no pattern.
        ties: What stands between it and other nodes of which as much matched, in graph order.
    """

    rule: str
    applies: bool
    node: str | None
    reason: str
    miss: Miss | None = None
    is_rule: bool = True
    ties: tuple[Explanation, ...] = ()

    def __str__(self) -> str:
        verb = _VERBS[self.is_rule, self.applies]
        place = f" at %{self.node}" if self.node else ""
        lines = [f"{self.rule} {verb}{place}", self.reason]
        lines += [f"as near at %{tie.node}: {tie._in_short}" for tie in self.ties[:_MOST_TIES]]
        if len(self.ties) > _MOST_TIES:
            lines.append(f"as near at {len(self.ties) - _MOST_TIES} more nodes")
        return "\n".join(lines)

    @property
    def _in_short(self) -> str:
        if self.miss is not None:
            return f"expected {self.miss.expected}, got {self.miss.got}"
        return self.reason.splitlines()[0]

    __repr__ = __str__


# How many other nodes of which as much matched are told.
_MOST_TIES = 3

# Whether it is a rule, and whether it fits.
_VERBS = {
    (True, True): "applies",
    (True, False): "does not apply",
    (False, True): "matches",
    (False, False): "does not match",
}


def explain(
    gm: fx.GraphModule | GraphProgram,
    wanted: Rule | Pattern | Callable[..., Any],
    at: Any = None,
) -> Explanation:
    """Tell why a rule does not apply: how much matched, which node stopped it, which line.

    Args:
        gm: The module; or a captured program, whose graph that ran last is looked at.
        wanted: A rule; or, as for `find`, a pattern, or a function that computes it.
        at: The node where its root should match, or its name; the nearest miss in the graph when
            left out.

    Returns:
        The explanation; where several nodes could be meant, of the one where most matched. Where
        as much did at several, it names the first in full and the others in short.

    Raises:
        FxkitError: When the graph has no node of that name, or it is no graph, rule or pattern.

    Cost: linear in the nodes.

    Example:
        >>> import torch, fxkit
        >>> @fxkit.rule
        ... def negate_twice(x):
        ...     return -(-x), x
        >>> gm = fxkit.symbolic_trace(lambda x: -torch.abs(x))
        >>> print(fxkit.explain(gm, negate_twice))
        negate_twice does not apply at %neg
        negate_twice at %neg: 1 of 2 operations matched
        expected aten.neg, got aten.abs
          node:  %abs_1 = aten.abs(%x)
        ...
    """
    gm = graph_module_of(gm)
    asked = _asked(wanted)
    is_rule = isinstance(asked, Rule)
    if at is not None:
        at = getattr(at, "name", at)
        node = next((n for n in gm.graph.nodes if n.name == at), None)
        if node is None:
            raise FxkitError(f"expected the name of a node, got {at!r}", hint="print the graph")
        return _explain_at(asked, node, Safety(gm.graph))
    operators = asked.root_operators
    roots = [n for n in gm.graph.nodes if (c := resolve(n)) is not None and c.name in operators]
    if not roots:
        reason = f"expected {' or '.join(operators)} somewhere in the graph, got "
        reason += _twin_of(operators, gm.graph) or "none"
        return Explanation(asked.name, False, None, reason, is_rule=is_rule)
    safety = Safety(gm.graph)
    tried = [_explain_at(asked, node, safety) for node in roots]
    nearest = max(tried, key=_nearness)
    if nearest.applies:
        return nearest
    alike = [each for each in tried if _nearness(each) == _nearness(nearest)]
    return replace(nearest, ties=tuple(each for each in alike if each is not nearest))


def _twin_of(operators: Iterable[str], graph: fx.Graph) -> str | None:
    """Return the first node that differs from the operators only in what it writes to, as text."""
    wanted = {name.removesuffix("_") for name in operators}
    for node in graph.nodes:
        call = resolve(node)
        if call is not None and call.name.removesuffix("_") in wanted:
            advice = _IN_PLACE if call.name.endswith("_") else "which writes to no operand"
            return f"{call.name}, {advice}{_shown(node)}"
    return None


_IN_PLACE = (
    "which writes in place: run fxkit.passes.Functionalise() before, or write the pattern so too"
)


def _asked(wanted: Any) -> Rule | Pattern:
    """Return the rule or the pattern that was given, or the pattern of a function."""
    if isinstance(wanted, Rule):
        return wanted
    if isinstance(wanted, Pattern) or callable(wanted):
        return pattern(wanted)
    return check_rules(wanted)[0]


def _explain_at(asked: Rule | Pattern, node: fx.Node, safety: Safety) -> Explanation:
    if isinstance(asked, Pattern):
        found = match_at(asked, node)
        miss = found if isinstance(found, Miss) else None
        return Explanation(asked.name, miss is None, node.name, str(found), miss, is_rule=False)
    found = match_at(asked.pattern, node, commute=asked.commute)
    if isinstance(found, Miss):
        return Explanation(asked.name, False, node.name, str(found), found)
    reason = refusal(asked, found) or safety.refusal(asked, found)
    if reason is not None:
        text = f"all {len(asked.pattern)} operations matched, but {reason}"
        shown = "".join(_shown(n) for n in (node, *_named_in(reason, node)))
        return Explanation(asked.name, False, node.name, text + shown)
    return Explanation(asked.name, True, node.name, str(found))


def _named_in(reason: str, root: fx.Node) -> list[fx.Node]:
    """Return the computed nodes that a reason names, the root aside, in graph order."""
    names = set(re.findall(r"%(\w+)", reason))
    computed = (n for n in root.graph.nodes if n.op not in ("placeholder", "output"))
    return [n for n in computed if n.name in names and n is not root]


def _shown(node: fx.Node) -> str:
    source = format_source(node)
    return f"\n  node:  {format_node(node)}" + (f"\n  from:  {source}" if source else "")


def _nearness(explanation: Explanation) -> int:
    if explanation.applies:
        return 1_000_000
    return 100_000 if explanation.miss is None else explanation.miss.matched
