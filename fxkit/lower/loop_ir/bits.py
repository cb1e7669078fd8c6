"""Numbers that are told apart by their bits."""

from __future__ import annotations

import struct

Number = bool | int | float


class Bits:
    """A number that equals only itself: -0.0 is not 0.0, and a NaN equals the same NaN."""

    __slots__ = ("_key", "value")

    def __init__(self, value: Number) -> None:
        self.value = value
        self._key = (type(value), struct.pack("d", value) if type(value) is float else value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bits) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.value)
