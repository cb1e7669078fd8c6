"""A placeholder in guards for any number of a type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUMBER_KINDS = frozenset({int, float})


@dataclass(frozen=True, slots=True)
class AnyNumber:
    """Stands for any number of a type; ints are those that torch can take."""

    kind: type

    def __repr__(self) -> str:
        return f"an {self.kind.__name__}" if self.kind is int else f"a {self.kind.__name__}"

    def has(self, value: Any) -> bool:
        """Tell whether a value is such a number."""
        if type(value) is not self.kind:
            return False
        return self.kind is float or -(1 << 63) <= value < 1 << 63


_ANY = {kind: (kind, AnyNumber(kind)) for kind in NUMBER_KINDS}


def with_free(tokens: list[Any], free: frozenset[int]) -> list[Any]:
    """Return what arguments look like when some numbers among them may be any of their type."""
    if not free:
        return tokens
    tokens = tokens.copy()
    for index in free:
        token = tokens[index] if index < len(tokens) else None
        if not isinstance(token, tuple) or token[0] not in NUMBER_KINDS:
            continue
        if token[0] is float or _ANY[int][1].has(token[1]):
            tokens[index] = _ANY[token[0]]
    return tokens
