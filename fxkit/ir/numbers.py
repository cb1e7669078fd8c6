"""When two numbers that stand in a graph are the same one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


def number_key(value: Any) -> Hashable:
    """Return what two numbers of one type have in common only when they are the same.

    Zeros of different sign are two numbers, since `1 / -0.0` is not `1 / 0.0`. NaN is itself.

    Args:
        value: A number; any other value is its own key.
    """
    if isinstance(value, float):
        return float.hex(value)
    if isinstance(value, complex):
        return float.hex(value.real), float.hex(value.imag)
    return value
