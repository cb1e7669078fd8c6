"""Scalars that are inputs of a graph, and what guards hold in the places of their values.

A step that is counted, a learning rate or a temperature: each call has another one, and a graph for
each would never end. Once a second value was seen, the next capture lets it be any scalar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxkit.tracing.values.sources import ValueSource
from fxkit.tracing.values.structure import Parts

ScalarPlace = str | tuple[int, Any]
"""The path of an argument; or `(id of what holds it, key)` of a number in the program's state."""


SCALAR_KINDS = frozenset({int, float})


@dataclass(frozen=True, slots=True)
class AnyScalar:
    """Stands for any number of a type; ints are those that torch can take."""

    kind: type

    def __repr__(self) -> str:
        return f"an {self.kind.__name__}" if self.kind is int else f"a {self.kind.__name__}"

    def has(self, value: Any) -> bool:
        """Tell whether a value is such a number."""
        if type(value) is not self.kind:
            return False
        return self.kind is float or -(1 << 63) <= value < 1 << 63


_ANY = {kind: (kind, AnyScalar(kind)) for kind in SCALAR_KINDS}


def with_free(tokens: list[Any], free: frozenset[int]) -> list[Any]:
    """Return what arguments look like when some numbers among them may be any of their type."""
    if not free:
        return tokens
    tokens = tokens.copy()
    for index in free:
        token = tokens[index] if index < len(tokens) else None
        if not isinstance(token, tuple) or token[0] not in SCALAR_KINDS:
            continue
        if token[0] is float or _ANY[int][1].has(token[1]):
            tokens[index] = _ANY[token[0]]
    return tokens


@dataclass(frozen=True, slots=True)
class ScalarInput:
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
