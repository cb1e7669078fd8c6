"""Why a match may not be rewritten: the effects around it.

A replacement is computed where the pattern's last node stood, or, of several results, where all of
the match may come together, from the operands as they are there.
That is the same value only when nobody wrote to them since the first matched node took them, when
no value that vanishes is used elsewhere, and when nobody can tell that a result shares memory which
it did not share, or no longer shares what it did.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import CONVERSIONS, PURE, all_pure, effects_of, holds_memory
from fxkit.analysis.moves import is_seen_apart
from fxkit.analysis.shared_memory import (
    is_with_caller,
    memory_above,
    memory_around,
    who_notices,
)
from fxkit.ir.op import Attribute, resolve
from fxkit.ir.printer import format_value
from fxkit.ir.types import TensorType, type_of
from fxkit.patterns.insertion_point import InsertionPoint, attributes_of, bound_to, place_of
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.sharing import sharing_of_match, sharing_of_replacement


class Safety:
    """Decides for one graph, and is told of each change to it.

    Args:
        graph: The graph. Cost: linear once; a decision costs what the match is large.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._is_pure: bool | None = None
        self._known: EffectOrder | None = None

    @property
    def _all_pure(self) -> bool:
        """Whether no node of the graph has an effect: asked for first at the first match."""
        if self._is_pure is None:
            self._is_pure = all_pure(self._graph)
        return self._is_pure

    @property
    def _order(self) -> EffectOrder:
        """The effects of the graph as it is now: made when they are first asked for."""
        if self._known is None:
            self._known = EffectOrder(self._graph)
        return self._known

    def refusal(self, rule: Rule, match: Match) -> str | None:
        """Return why the match may not be rewritten, or None when it may."""
        reason = self._escape(rule, match)
        if len(match.outputs) > 1:
            return reason or self._several(rule, match)
        if self._all_pure and rule.template.is_all_new:
            return reason
        if reason is None and not self._all_pure and self._order.aliases.effectful:
            reason = (
                self._mode_change(match)
                or self._written_operand(match)
                or self._moved_effect(match, match.root)
            )
        return (
            reason
            or self._new_alias(rule, match, match.root)
            or self._lost_alias(rule, match, match.root)
        )

    def place_of(self, rule: Rule, match: Match) -> InsertionPoint | str:
        """Return where a replacement may stand, or why there is no such place."""
        if len(match.outputs) == 1:
            taken = [match.values.get(reused) for reused in rule.template.reused]
            return InsertionPoint(match.root.next if match.root in taken else match.root)
        return place_of(rule, match, None if self._all_pure else self._order)

    def _several(self, rule: Rule, match: Match) -> str | None:
        """Several results are computed at one place, and the matched nodes come together there."""
        found = self.place_of(rule, match)
        if isinstance(found, str):
            return found
        place = found.before
        reason = None if self._all_pure else self._moved_effect(match, place)
        if self._all_pure and rule.template.is_all_new and not rule.template.overlapping:
            return reason
        return (
            reason
            or self._new_alias(rule, match, place)
            or self._one_memory(rule, match, place)
            or self._lost_alias(rule, match, place)
        )

    def inserted(self, node: fx.Node) -> None:
        """Take note of a node that a rewrite made."""
        if self._is_pure:
            self._is_pure = effects_of(node) is PURE
        if self._known is not None:
            self._known.aliases.add(node)

    def substituted(self, output: fx.Node, value: fx.Node) -> None:
        """Take note that `value` stands for `output` now, to its users and to the caller."""
        if self._known is not None:
            self._known.aliases.join(output, value)

    def _escape(self, rule: Rule, match: Match) -> str | None:
        """A vanishing value must have no user outside of the match."""
        interior = match.interior
        if not interior:
            return None
        kept = {match.values.get(operation) for operation in rule.template.reused}
        if rule.may_escape:
            kept.update(match.bindings.get(name) for name in rule.may_escape)
        matched = match.matched
        captured = [match.bindings.get(name) for name in match.pattern.captures]
        for node in interior:
            if node in kept:
                continue
            if node in captured:
                return f"%{node.name} is an operand of the match too"
            for user in node.users:
                if user not in matched:
                    return f"%{node.name} is used outside of the match too, by %{user.name}"
        return None

    def _mode_change(self, match: Match) -> str | None:
        """All of a match must run under the same gradient and autocast mode."""
        first = next(iter(match.nodes.values()))  # they are in graph order
        change = self._order.mode_between(first, match.root)
        return None if change is None else f"%{change.name} changes a mode in the middle of it"

    def _written_operand(self, match: Match) -> str | None:
        """No operand may change between the place where it was read and the root."""
        matched = match.matched
        for node in matched:
            if node is match.root:
                continue
            for operand in (*node.all_input_nodes, *attributes_of(node), node):
                writer = self._order.written_between(operand, node, match.root, matched)
                if writer is not None:
                    shown = format_value(operand)
                    return f"%{writer.name} may write to {shown} before %{match.root.name}"
        return None

    def _moved_effect(self, match: Match, place: fx.Node) -> str | None:
        """A matched node with an effect moves to the replacement: nothing may be in its way."""
        matched = match.matched
        for node in match.nodes.values():
            if node is place or effects_of(node).is_pure:
                continue
            between, end = (node.next, place) if node < place else (place, node)
            while between is not end:
                if between not in matched and not self._order.may_swap(node, between):
                    return f"%{node.name} may not change places with %{between.name}"
                between = between.next
        return None

    def _new_alias(self, rule: Rule, match: Match, place: fx.Node) -> str | None:
        """A replacement that is an operand, or a view of one, must not show that."""
        gone = _gone(rule, match)
        for index, (output, value) in enumerate(
            zip(match.outputs, rule.template.values, strict=True)
        ):
            if not rule.template.shared[index] or not holds_memory(output):
                continue
            before = sharing_of_match(match, output, gone).surely
            for operand in sharing_of_replacement(rule, match, index).may:
                if _is_converted(value, operand, output):
                    continue
                is_itself = operand is bound_to(rule, match, value)
                if is_itself and self._order.aliases.may_alias(operand, output):
                    if is_seen_apart(output, operand):
                        return (
                            f"the caller gets a tensor each of %{output.name} and %{operand.name}"
                        )
                    continue
                if operand in before:
                    continue
                who = self._noticed(output, operand, before, gone, _first(place, output))
                if who is not None:
                    return f"%{output.name} would share memory with %{operand.name}, and {who}"
        return None

    def _lost_alias(self, rule: Rule, match: Match, place: fx.Node) -> str | None:
        """A replacement in memory of its own must not show that what it replaces was a view."""
        gone = _gone(rule, match)
        for index, output in enumerate(match.outputs):
            before = sharing_of_match(match, output, gone).may
            if not before or not holds_memory(output):
                continue
            after = sharing_of_replacement(rule, match, index).surely
            pairs = [pair for pair in rule.template.overlapping if index in pair]
            together = [match.outputs[i] for pair in pairs for i in pair if i != index]
            for operand in before:
                if operand in after or operand in together:
                    continue
                who = self._noticed(
                    output, operand, after, gone.union(together), _first(place, output)
                )
                if who is not None:
                    return f"%{output.name} would share no memory with %{operand.name}, and {who}"
        return None

    def _one_memory(self, rule: Rule, match: Match, place: fx.Node) -> str | None:
        """Results that lay apart and share memory now must not show that."""
        gone = _gone(rule, match)
        for pair in rule.template.overlapping:
            one, other = (match.outputs[index] for index in pair)
            if self._order.aliases.may_alias(one, other):
                continue
            who = self._noticed(one, other, (), gone, place.prev)
            if who is not None:
                return f"%{one.name} would share memory with %{other.name}, and {who}"
        return None

    def _noticed(
        self,
        output: fx.Node,
        operand: fx.Node,
        linked: Collection[fx.Node],
        gone: Collection[fx.Node],
        first: fx.Node,
    ) -> str | None:
        """Return who sees whether a result shares memory with an operand, or None.

        Args:
            output: The result.
            operand: The operand.
            linked: Nodes that it shares memory with before and after: who shares theirs is no news.
            gone: Matched nodes that go away.
            first: What is written up to this node is in what the result is made of.
        """
        aliases = self._order.aliases
        derived = memory_above(output, gone, _MOST_EDGES)
        is_written = any(map(aliases.writers, (output, operand)))
        if derived is not None and not is_written and not is_with_caller(derived):
            return None
        rest = memory_around([operand], {output, *gone}, _MOST_EDGES)
        if derived is None or rest is None:
            return f"more than {_MOST_EDGES} values and users have to do with its memory"
        if not rest.isdisjoint(linked):
            return None
        return who_notices(derived, rest, first, gone, self._attribute_writers)

    def _attribute_writers(self, read: fx.Node) -> list[fx.Node]:
        """Return the calls of modules that write to what a `get_attr` reads."""
        return [
            writer
            for writer in self._order.aliases.writers(read)
            if any(isinstance(written, Attribute) for written in effects_of(writer).writes)
        ]


# So many values and users of one memory are looked at, for the time a decision takes.
_MOST_EDGES = 4096


def _gone(rule: Rule, match: Match) -> frozenset[fx.Node]:
    """Return the matched nodes that no one will use any more: no results, nor used elsewhere."""
    kept = {match.values.get(operation) for operation in rule.template.reused}
    return frozenset(
        node
        for node in match.interior
        if node not in kept and all(user in match.matched for user in node.users)
    )


def _first(place: fx.Node, output: fx.Node) -> fx.Node:
    return place.prev if place < output else output


def _is_converted(value: fx.Node, operand: fx.Node, output: fx.Node) -> bool:
    """Tell whether a replacement is known to convert an operand to another dtype, in new memory."""
    call = resolve(value)
    if call is None or call.name not in CONVERSIONS:
        return False
    before, after = type_of(operand), type_of(output)
    is_known = isinstance(before, TensorType) and isinstance(after, TensorType)
    return is_known and before.dtype != after.dtype
