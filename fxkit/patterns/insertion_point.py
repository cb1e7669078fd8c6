"""The insertion point of a replacement that stands for several results.

It is computed at one place, from the operands as they are there. So the matched nodes come together
at that place: each may move as far as nobody writes to what it reads and no mode changes, the place
comes after all operands, and whoever uses a result comes after the place. A late operand, such
as the weight of the next layer, is lifted to the place where that may be.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import effects_of
from fxkit.ir.op import Attribute, resolve
from fxkit.ir.printer import format_value
from fxkit.ir.types import type_of
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Rule
from fxkit.torch_adapters.fx_nodes import is_erased, order_key

# More operands than this are not lifted.
_MOST_LIFTED = 16


@dataclass(frozen=True)
class InsertionPoint:
    """Where a replacement goes.

    Attributes:
        before: The node right before which it stands.
        lifted: Operands that have to go there too, in front of it, in their order.
    """

    before: fx.Node
    lifted: tuple[fx.Node, ...] = ()


def place_of(rule: Rule, match: Match, order: EffectOrder | None) -> InsertionPoint | str:
    """Return where a replacement may stand, or why there is no such place.

    It is the root where that may be, else the nearest place to it.

    Args:
        rule: The rule.
        match: A match of its pattern, which has several outputs.
        order: The effects in the graph; None when there are none.

    Cost: linear in the match and its users, logarithmic in the writers of what it reads.
    """
    refusal = _taken_result(rule, match)
    if refusal is not None:
        return refusal
    limits = _Limits()
    early = _limit_by_users(limits, rule, match)
    if early is not None:
        return early
    order = order if order is not None and order.aliases.effectful else None
    if order is not None:
        _limit_by_effects(limits, match, order)
    for reused in rule.template.reused:
        limits.come_after(match.values.get(reused), "the replacement takes")
    lifted = _liftable(match, limits.before[0], order) if limits.before is not None else []
    for node in match.nodes.values():
        for operand in node.all_input_nodes:
            if operand not in match.matched and operand not in lifted:
                limits.come_after(operand, f"%{node.name} takes")
    return limits.place_near(match.root, tuple(lifted))


def _liftable(match: Match, place: fx.Node, order: EffectOrder | None) -> list[fx.Node]:
    """Return all that a match needs from behind a place, when that may be computed there.

    It must be pure, not made of the match, and read what nobody writes to in between.
    """
    found: set[fx.Node] = set()
    stack = [
        operand
        for node in match.nodes.values()
        for operand in node.all_input_nodes
        if operand not in match.matched and not operand < place
    ]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if node in match.matched or len(found) >= _MOST_LIFTED or not _may_rise(node, place, order):
            return []
        found.add(node)
        stack.extend(o for o in node.all_input_nodes if o in match.matched or not o < place)
    return sorted(found, key=order_key)


def _may_rise(node: fx.Node, place: fx.Node, order: EffectOrder | None) -> bool:
    """Tell whether a node may go to an earlier place, as far as effects go."""
    if node.op == "placeholder" or not effects_of(node).is_pure:
        return False
    if order is None:
        return True
    walls = [order.mode_changes]
    walls += [order.aliases.writers(o) for o in (*node.all_input_nodes, *attributes_of(node), node)]
    nearest = (_around(wall, node, frozenset())[0] for wall in walls)
    return all(wall is None or wall < place for wall in nearest)


def bound_to(rule: Rule, match: Match, value: object) -> fx.Node | None:
    """Return the node of the graph that an input of a replacement stands for, if it is one."""
    if not isinstance(value, fx.Node):
        return None
    if value.op == "placeholder":
        bound = match.bindings.get(str(value.target))
        return bound if isinstance(bound, fx.Node) else None
    reused = rule.template.reuses.get(value)
    return match.values.get(reused) if reused is not None else None


def attributes_of(node: fx.Node) -> list[Attribute]:
    """Return the parameters and buffers that a called module brings itself."""
    call = resolve(node) if node.op == "call_module" else None
    values = () if call is None else call.arguments.values()
    return [value for value in values if isinstance(value, Attribute)]


@dataclass
class _Limits:
    """The places that are left: after one node and, at the latest, right before another."""

    after: tuple[fx.Node, str] | None = None
    before: tuple[fx.Node, str] | None = None

    def come_after(self, node: fx.Node | None, why: str) -> None:
        if node is not None and (self.after is None or self.after[0] < node):
            self.after = node, why

    def come_before(self, node: fx.Node | None, why: str) -> None:
        if node is not None and (self.before is None or node < self.before[0]):
            self.before = node, why

    def place_near(self, root: fx.Node, lifted: tuple[fx.Node, ...]) -> InsertionPoint | str:
        if self.after is not None and self.before is not None:
            (after, why_after), (before, why_before) = self.after, self.before
            if not after < before:
                return (
                    f"the replacement would have to stand before %{before.name}, which "
                    f"{why_before}, and after %{after.name}, which {why_after}"
                )
        if self.before is not None and (lifted or self.before[0] < root):
            return InsertionPoint(self.before[0], lifted)
        if self.after is not None and not self.after[0] < root:
            return InsertionPoint(self.after[0].next)
        return InsertionPoint(root)


def _taken_result(rule: Rule, match: Match) -> str | None:
    """Return that a result of the match is an operand of it too, which a replacement can't be."""
    captured = [match.bindings.get(str(n.target)) for n in rule.template.inputs]
    operands: list[fx.Node] = []
    map_arg(captured, operands.append)
    for output in match.outputs:
        if output in operands:
            return f"%{output.name} is an operand of the match too"
    return None


def _limit_by_users(limits: _Limits, rule: Rule, match: Match) -> str | None:
    """Note who uses results that are computed anew; return who comes too early for another."""
    for output, value in zip(match.outputs, rule.template.values, strict=True):
        given = bound_to(rule, match, value)
        for user in output.users:
            if user in match.matched or given is output:
                continue
            if given is None:
                limits.come_before(user, f"uses %{output.name}")
            elif not given < user:
                return f"%{user.name} uses %{output.name} before %{given.name}"
    return None


def _limit_by_effects(limits: _Limits, match: Match, order: EffectOrder) -> None:
    for node in match.nodes.values():
        if _is_projection(node):
            continue
        for read in (*node.all_input_nodes, *attributes_of(node), node):
            writers = order.aliases.writers(read)
            last, first = _around(writers, node, match.matched)
            why = f"may write to {format_value(read)}"
            limits.come_after(last, why)
            limits.come_before(first, why)
        last, first = _around(order.mode_changes, node, match.matched)
        limits.come_after(last, "changes a mode")
        limits.come_before(first, "changes a mode")


def _is_projection(node: fx.Node) -> bool:
    """Tell whether a node takes one result of several, which reads nobody's memory."""
    call = resolve(node)
    if call is None or call.name != "python.getitem":
        return False
    taken = node.args[0]
    return isinstance(taken, fx.Node) and isinstance(type_of(taken), tuple)


def _around(
    ordered: list[fx.Node], node: fx.Node, but: frozenset[fx.Node]
) -> tuple[fx.Node | None, fx.Node | None]:
    """Return the last of some nodes, in graph order, before a node, and the first one after it."""
    place = bisect.bisect_left(ordered, order_key(node), key=order_key)
    earlier = (ordered[index] for index in range(place - 1, -1, -1))
    later = (ordered[index] for index in range(place, len(ordered)))
    return _first_left(earlier, but), _first_left(later, but)


def _first_left(nodes: Iterator[fx.Node], but: frozenset[fx.Node]) -> fx.Node | None:
    return next((node for node in nodes if node not in but and not is_erased(node)), None)
