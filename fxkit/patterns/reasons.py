"""Why a rule did not apply: the nearest miss."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxkit.errors import FxkitError
from fxkit.ir.given_graphs import check_graph_module
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_node, format_source
from fxkit.patterns.engine import refusal
from fxkit.patterns.matching import Miss, match_at
from fxkit.patterns.rewriting import Rule, check_rules
from fxkit.patterns.safety import Safety


@dataclass(frozen=True)
class Explanation:
    """What stands between a rule and a node.

    Attributes:
        rule: Name of the rule.
        applies: Whether it would be applied.
        node: Name of the node where its root was looked for.
        reason: What stopped it, as text; where it applies, what it matched.
        miss: The structural miss, when that is the reason.
    """

    rule: str
    applies: bool
    node: str | None
    reason: str
    miss: Miss | None = None

    def __str__(self) -> str:
        verb = "applies" if self.applies else "does not apply"
        place = f" at %{self.node}" if self.node else ""
        return f"{self.rule} {verb}{place}\n{self.reason}"

    __repr__ = __str__


def explain(gm: fx.GraphModule, rule: Rule, at: Any = None) -> Explanation:
    """Tell why a rule does not apply: how much matched, which node stopped it, which line.

    Args:
        gm: The module.
        rule: The rule.
        at: The node where its root should match, or its name; the nearest miss in the graph when
            left out.

    Returns:
        The explanation; where several nodes could be meant, of the one where most matched.

    Raises:
        FxkitError: When the graph has no node of that name, or it is no graph or no rule.

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
    check_graph_module(gm)
    rule = check_rules(rule)[0]
    if at is not None:
        at = getattr(at, "name", at)
        node = next((n for n in gm.graph.nodes if n.name == at), None)
        if node is None:
            raise FxkitError(f"expected the name of a node, got {at!r}", hint="print the graph")
        return _explain_at(rule, node, Safety(gm.graph))
    wanted = rule.pattern.root_operators
    roots = [n for n in gm.graph.nodes if (call := resolve(n)) is not None and call.name in wanted]
    if not roots:
        reason = f"expected {' or '.join(wanted)} somewhere in the graph, got none"
        return Explanation(rule.name, False, None, reason)
    safety = Safety(gm.graph)
    return max((_explain_at(rule, node, safety) for node in roots), key=_nearness)


def _explain_at(rule: Rule, node: fx.Node, safety: Safety) -> Explanation:
    found = match_at(rule.pattern, node, commute=rule.commute)
    if isinstance(found, Miss):
        return Explanation(rule.name, False, node.name, str(found), found)
    reason = refusal(rule, found) or safety.refusal(rule, found)
    if reason is not None:
        text = f"all {len(rule.pattern)} operations matched, but {reason}"
        shown = "".join(_shown(n) for n in (node, *_named_in(reason, node)))
        return Explanation(rule.name, False, node.name, text + shown)
    return Explanation(rule.name, True, node.name, str(found))


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
