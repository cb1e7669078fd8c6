"""Patterns of several outputs: where an output beside the root can be found, through users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from fxkit.ir.op import operator_of
from fxkit.patterns.pattern_nodes import (
    AnyOf,
    Capture,
    Chain,
    Named,
    Operation,
    PatternNode,
    slice_parts,
)


class OutputSearch:
    """Finds nodes that a pattern node may match, from what is bound below it.

    Args:
        bindings: Capture → what it stands for.
        values: Pattern node → what it matched.
        taken: Nodes that stand for another operation already.
    """

    def __init__(
        self,
        bindings: Mapping[str, Any],
        values: Mapping[PatternNode, Any],
        taken: Mapping[fx.Node, Any],
    ) -> None:
        self._bindings = bindings
        self._values = values
        self._taken = taken
        self._known: dict[PatternNode, list[fx.Node] | None] = {}

    def candidates(self, wanted: Any) -> list[fx.Node] | None:
        """Return the nodes that may match; None when nothing below is bound to a node.

        Cost: linear in the pattern, and in the users of the nodes on the way.
        """
        if not isinstance(wanted, PatternNode):
            return None
        if wanted not in self._known:
            self._known[wanted] = self._find(wanted)
        return self._known[wanted]

    def _find(self, wanted: PatternNode) -> list[fx.Node] | None:
        if isinstance(wanted, Capture):
            return _nodes_in(self._bindings.get(wanted.name))
        if wanted in self._values:
            return _nodes_in(self._values[wanted])
        if isinstance(wanted, Operation):
            return self._calls(wanted)
        if isinstance(wanted, AnyOf):
            return self._choices(wanted)
        if isinstance(wanted, Named):
            return self.candidates(wanted.inner)
        return self._links(wanted) if isinstance(wanted, Chain) else None

    def _calls(self, wanted: Operation) -> list[fx.Node] | None:
        """Return the calls of an operator that take a candidate for one of its operands."""
        below = [self.candidates(value) for value in _operands(wanted)]
        known = [found for found in below if found is not None]
        if not known:
            return None
        users = dict.fromkeys(user for node in min(known, key=len) for user in node.users)
        return [user for user in users if user not in self._taken and _calls(user, wanted)]

    def _choices(self, wanted: AnyOf) -> list[fx.Node] | None:
        """Return the candidates of all choices, when each of them can be found."""
        found: dict[fx.Node, None] = {}
        for choice in wanted.choices:
            candidates = self.candidates(choice)
            if candidates is None:
                return None
            found.update(dict.fromkeys(candidates))
        return list(found)

    def _links(self, wanted: Chain) -> list[fx.Node] | None:
        """Return the candidates for the ends of chains of every length."""
        ends = self.candidates(wanted.start)
        if ends is None:
            return None
        found = dict.fromkeys(ends if wanted.at_least == 0 else [])
        for length in range(1, wanted.at_most + 1):
            if not ends:
                break
            hole = {**self._bindings, wanted.hole.name: ends}
            ends = OutputSearch(hole, self._values, self._taken).candidates(wanted.link) or []
            found.update(dict.fromkeys(ends if length >= wanted.at_least else []))
        return list(found)


def _nodes_in(bound: Any) -> list[fx.Node] | None:
    """Return the node, or the nodes of a list, that a capture stands for; None without any."""
    values = bound if isinstance(bound, (list, tuple)) else [bound]
    return [value for value in values if isinstance(value, fx.Node)] or None


def _calls(node: fx.Node, wanted: Operation) -> bool:
    operator = operator_of(node)
    return operator is not None and operator.name == wanted.operator


def _operands(wanted: Any) -> Iterator[Any]:
    """Yield the pattern nodes among an operation's arguments, out of lists too."""
    values = wanted.arguments.values() if isinstance(wanted, Operation) else wanted
    for value in values:
        if isinstance(value, slice):
            yield from slice_parts(value)
        elif isinstance(value, (list, tuple)):
            yield from _operands(value)
        else:
            yield value
