"""Write a pattern out: one plain pattern for each way that its words can be read.

A plain pattern has operations, captures and constants only, so that it can be computed. Proofs and
the lint of rules run each of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from fxkit.patterns.pattern_nodes import (
    AnyOf,
    Capture,
    Chain,
    Constant,
    Named,
    Operation,
    Pattern,
    PatternNode,
    slice_parts,
)

# Beyond this many readings a sample has to do.
_MOST_READINGS = 4096


def plain_variants(pattern: Pattern, limit: int = 64) -> list[Pattern]:
    """Return the plain patterns that a pattern stands for.

    Every choice of `any_of` and `optional` is taken, and chains of the shortest length and of one
    link more; chains within one another take the same choices in each link.

    Args:
        pattern: The pattern.
        limit: How many to return at most; beyond that a sample, always the same.

    Cost: linear in the number of readings times the pattern.
    """
    found: list[Pattern] = []
    open_ends: list[dict[PatternNode, int]] = [{}]
    while open_ends and len(found) < _MOST_READINGS:
        decided = open_ends.pop()
        reading = _Reading(decided)  # one for all outputs, which share what they have in common
        try:
            outputs = tuple(map(reading.of, pattern.outputs))
        except _Undecided as question:
            options = _options(question.node)
            open_ends.extend({**decided, question.node: option} for option in reversed(options))
        else:
            found.append(replace(pattern, outputs=outputs))
    if len(found) <= limit:
        return found
    return random.Random(0).sample(found, limit)


class _Undecided(Exception):
    def __init__(self, node: AnyOf | Chain) -> None:
        super().__init__(node)
        self.node = node


def _options(node: AnyOf | Chain) -> list[int]:
    """Return the choices, by position, or the lengths of a chain."""
    if isinstance(node, AnyOf):
        return list(range(len(node.choices)))
    return [length for length in (node.at_least, node.at_least + 1) if length <= node.at_most]


@dataclass
class _Reading:
    """One way to read a pattern: each alternative and each length decided."""

    decided: dict[PatternNode, int]
    holes: dict[Capture, Any] = field(default_factory=dict)
    known: dict[PatternNode, Any] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """Return the plain pattern node that a pattern node is in this reading."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(item) for item in value)
        if isinstance(value, slice):
            return slice(*map(self.of, slice_parts(value)))
        if isinstance(value, Capture):
            return self.holes.get(value, value)
        if not isinstance(value, PatternNode) or isinstance(value, Constant):
            return value
        if value not in self.known:
            self.known[value] = self._plain(value)
        return self.known[value]

    def _plain(self, value: PatternNode) -> Any:
        if isinstance(value, Operation):
            arguments = {key: self.of(inner) for key, inner in value.arguments.items()}
            return replace(value, arguments=arguments)
        if isinstance(value, Named):
            return self.of(value.inner)
        if value not in self.decided and isinstance(value, (AnyOf, Chain)):
            raise _Undecided(value)
        if isinstance(value, AnyOf):
            return self.of(value.choices[self.decided[value]])
        return self._links(value)

    def _links(self, value: Any) -> Any:
        current = self.of(value.start)
        for _ in range(self.decided[value]):
            current = _Reading(self.decided, {**self.holes, value.hole: current}).of(value.link)
        return current
