"""Operators that were defined by a composition of others, by their definition."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fxkit.torch_adapters.operators import OpOverload

_COMPOSITIONS: weakref.WeakKeyDictionary[OpOverload, Callable[..., Any]] = (
    weakref.WeakKeyDictionary()
)


def declare_composition(overload: OpOverload, function: Callable[..., Any]) -> None:
    """Declare what an operator is made of: a function that calls others, of the same arguments."""
    _COMPOSITIONS[overload] = function


def composition_of(overload: OpOverload | None) -> Callable[..., Any] | None:
    """Return the function that computes an operator by those it was defined by, or None."""
    return None if overload is None else _COMPOSITIONS.get(overload)
