"""Operators that were defined by a composition of others, by their definition."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fxkit.torch_adapters.operators import OpOverload

_FOR_KERNELS: weakref.WeakSet[OpOverload] = weakref.WeakSet()
_COMPOSITIONS: weakref.WeakKeyDictionary[OpOverload, Callable[..., Any]] = (
    weakref.WeakKeyDictionary()
)


def declare_composition(
    overload: OpOverload, function: Callable[..., Any], *, in_kernels: bool = False
) -> None:
    """Declare what an operator is made of: a function that calls others, of the same arguments.

    Args:
        overload: The operator.
        function: Computes it.
        in_kernels: Whether kernels take in what it is made of, in place of a row for it.
    """
    _COMPOSITIONS[overload] = function
    if in_kernels:
        _FOR_KERNELS.add(overload)


def composition_of(overload: OpOverload | None) -> Callable[..., Any] | None:
    """Return the function that computes an operator by those it was defined by, or None."""
    return None if overload is None else _COMPOSITIONS.get(overload)


def is_made_in_kernels(overload: OpOverload | None) -> bool:
    """Tell whether kernels take in what an operator is made of."""
    return overload is not None and overload in _FOR_KERNELS
