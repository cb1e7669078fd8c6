"""Why a match may not be rewritten: the effects around it.

A replacement is computed where the pattern's last node stood, or, of several results, where all of
the match may come together, from the operands as they are there.
That is the same value only when nobody wrote to them since the first matched node took them, when
no value that vanishes is used elsewhere, and when nothing that now shares memory is written.
"""

from __future__ import annotations

from torch import fx

from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import CONVERSIONS, PURE, all_pure, effects_of
from fxkit.analysis.moves import is_seen_apart
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_value
from fxkit.ir.types import TensorType, type_of
from fxkit.patterns.matching import Match
from fxkit.patterns.placing import Place, attributes_of, bound_to, place_of
from fxkit.patterns.rewriting import Rule


class Safety:
    """Decides for one graph, and is told of each change to it.

    Args:
        graph: The graph. Cost: linear once; a decision costs what the match is large.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._all_pure = all_pure(graph)
        self._known: _Effects | None = None

    @property
    def _effects(self) -> _Effects:
        """The effects of the graph as it is now: made when they are first asked for."""
        if self._known is None:
            self._known = _Effects(self._graph)
        return self._known

    def refusal(self, rule: Rule, match: Match) -> str | None:
        """Return why the match may not be rewritten, or None when it may."""
        reason = self._escape(rule, match)
        if len(match.outputs) > 1:
            return reason or self._several(rule, match)
        if self._all_pure and rule.template.is_all_new:
            return reason
        if reason is None and not self._all_pure and self._effects.order.aliases.effectful:
            reason = (
                self._mode_change(match)
                or self._written_operand(match)
                or self._moved_effect(match, match.root)
            )
        return reason or self._new_alias(rule, match, match.root)

    def place_of(self, rule: Rule, match: Match) -> Place | str:
        """Return where a replacement may stand, or why there is no such place."""
        if len(match.outputs) == 1:
            taken = [match.values.get(reused) for reused in rule.template.reused]
            return Place(match.root.next if match.root in taken else match.root)
        return place_of(rule, match, None if self._all_pure else self._effects.order)

    def _several(self, rule: Rule, match: Match) -> str | None:
        """Several results are computed at one place, and the matched nodes come together there."""
        found = self.place_of(rule, match)
        if isinstance(found, str):
            return found
        place = found.before
        reason = None if self._all_pure else self._moved_effect(match, place)
        if self._all_pure and rule.template.is_all_new and not rule.template.overlapping:
            return reason
        return reason or self._new_alias(rule, match, place) or self._one_memory(rule, match, place)

    def inserted(self, node: fx.Node) -> None:
        """Take note of a node that a rewrite made."""
        if self._all_pure:
            self._all_pure = effects_of(node) is PURE
        if self._known is not None:
            self._known.inserted(node)

    def substituted(self, output: fx.Node, value: fx.Node) -> None:
        """Take note that `value` stands for `output` now, to its users and to the caller."""
        if self._known is not None:
            self._known.substituted(output, value)

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
        change = self._effects.order.mode_between(first, match.root)
        return None if change is None else f"%{change.name} changes a mode in the middle of it"

    def _written_operand(self, match: Match) -> str | None:
        """No operand may change between the place where it was read and the root."""
        matched = match.matched
        for node in matched:
            if node is match.root:
                continue
            for operand in (*node.all_input_nodes, *attributes_of(node), node):
                writer = self._effects.order.written_between(operand, node, match.root, matched)
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
                if between not in matched and not self._effects.order.may_swap(node, between):
                    return f"%{node.name} may not change places with %{between.name}"
                between = between.next
        return None

    def _new_alias(self, rule: Rule, match: Match, place: fx.Node) -> str | None:
        """A replacement that is an operand, or may be a view of one, must not show that."""
        template = rule.template
        for output, value, inputs in zip(
            match.outputs, template.values, template.shared, strict=True
        ):
            if not isinstance(type_of(output), (TensorType, type(None))):
                continue
            for shared in inputs:
                operand = bound_to(rule, match, shared)
                if operand is None or _is_converted(value, operand, output):
                    continue
                first = place.prev if place < output else output
                reason = self._shown(output, operand, first, is_itself=shared is value)
                if reason is not None:
                    return reason
        return None

    def _one_memory(self, rule: Rule, match: Match, place: fx.Node) -> str | None:
        """Results that lay apart and share memory now must not show that."""
        for one, other in rule.template.overlapping:
            is_itself = rule.template.values[one] is rule.template.values[other]
            results = match.outputs[one], match.outputs[other]
            reason = self._shown(*results, place.prev, is_itself=is_itself)
            if reason is not None:
                return reason
        return None

    def _shown(
        self, output: fx.Node, operand: fx.Node, first: fx.Node, *, is_itself: bool
    ) -> str | None:
        """Return who would see that a result is, or shares memory with, an operand.

        What is written up to the `first` node is in what the result is made of.
        """
        aliases = self._effects.order.aliases
        if aliases.may_alias(operand, output):
            if is_itself and is_seen_apart(output, operand):
                return f"the caller gets a tensor each of %{output.name} and %{operand.name}"
            return None
        for node in (operand, output):
            last = next(reversed(aliases.writers(node)), None)
            if last is not None and first < last:
                return (
                    f"%{output.name} would share memory with %{operand.name}, and "
                    f"%{last.name} writes to it"
                )
        if self._effects.is_shared(output) and self._effects.is_shared(operand):
            return f"the caller would get %{output.name} sharing memory with %{operand.name}"
        return None


class _Effects:
    """The order that effects impose on a graph, and the memory that the caller sees too."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = EffectOrder(graph)
        aliases = self.order.aliases
        outside = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
        results = next(iter(reversed(graph.nodes))).all_input_nodes
        self._shared = {aliases.root(n) for n in (*outside, *results)}

    def inserted(self, node: fx.Node) -> None:
        aliases = effects_of(node).aliases
        shared = bool(aliases) and any(self.is_shared(operand) for operand in aliases)
        self.order.aliases.add(node)
        self._mark_shared(node, shared)

    def substituted(self, output: fx.Node, value: fx.Node) -> None:
        shared = self.is_shared(output) or self.is_shared(value)
        self.order.aliases.join(output, value)
        self._mark_shared(value, shared)

    def is_shared(self, node: fx.Node) -> bool:
        """Tell whether the caller may see a node's memory."""
        return self.order.aliases.root(node) in self._shared

    def _mark_shared(self, node: fx.Node, shared: bool) -> None:
        """Keep the mark of an alias set when it was joined with another."""
        if shared:
            self._shared.add(self.order.aliases.root(node))


def _is_converted(value: fx.Node, operand: fx.Node, output: fx.Node) -> bool:
    """Tell whether a replacement is known to convert an operand to another dtype, in new memory."""
    call = resolve(value)
    if call is None or call.name not in CONVERSIONS:
        return False
    before, after = type_of(operand), type_of(output)
    is_known = isinstance(before, TensorType) and isinstance(after, TensorType)
    return is_known and before.dtype != after.dtype
