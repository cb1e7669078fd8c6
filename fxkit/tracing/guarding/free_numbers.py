"""Dynamic numbers: plain ints and floats that were seen to change become inputs of a graph.

A step that is counted, a learning rate or a temperature: each call has another one, and a graph for
each would never end. Once a second value was seen, the next capture lets it be any number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fxkit.tracing.guarding import guards as g
from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.guarding.state_guards import StateGuard
from fxkit.tracing.values.any_numbers import NUMBER_KINDS, with_free
from fxkit.tracing.values.sources import ValueSource
from fxkit.tracing.values.structure import Parts

Where = str | tuple[int, Any]
"""The path of an argument; or `(id of what holds it, key)` of a number in the program's state."""


@dataclass(frozen=True, slots=True)
class NumberInput:
    """A number that a graph is given at each call.

    Attributes:
        name: Where it lies, as the user would write it.
        token: Which of the values in the arguments it is; None for one of the state.
        place: Where it lies in the state; None for an argument.
    """

    name: str
    token: int | None
    place: ValueSource | None

    def read(self, parts: Parts) -> Any:
        """Return the number of this call."""
        if self.token is None:
            assert self.place is not None
            return self.place.read()
        kind, value = parts.tokens[self.token]
        return float.fromhex(value) if kind is float else value


def changed_numbers(guards: Iterable[tuple[g.Guard, ...]], call: g.GuardedCall) -> set[Where]:
    """Return the numbers that differ from those for which graphs were captured.

    Args:
        guards: The guards of each graph.
        call: The call that none of them holds for.
    """
    found: set[Where] = set()
    for each in guards:
        for guard in each:
            if isinstance(guard, g.StructureGuard):
                found.update(_changed_arguments(guard, call.parts))
            elif isinstance(guard, StateGuard):
                found.update(_changed_entries(guard.holder))
    return found


def _changed_arguments(guard: g.StructureGuard, parts: Parts) -> Iterable[Where]:
    tokens = with_free(parts.tokens, guard.free)
    if len(tokens) != len(guard.tokens):
        return []
    pairs = zip(guard.tokens, tokens, parts.paths, strict=True)
    differing = [(old, new, path) for old, new, path in pairs if old != new]
    if any(old[0] is not new[0] or old[0] not in NUMBER_KINDS for old, new, _ in differing):
        return []
    return [path for _, _, path in differing]


def _changed_entries(holder: h.GuardedContainer) -> Iterable[Where]:
    now = holder.read()
    for key, before in holder.entries.items():
        current = now.get(key)
        if type(before) not in NUMBER_KINDS or type(current) is not type(before):
            continue
        if holder.is_guarded(key) and not h.is_same_value(current, before):
            yield id(holder.value), key
