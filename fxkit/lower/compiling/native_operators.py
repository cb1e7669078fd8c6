"""Operators that have a kernel of their own, built elsewhere: programs call it by its address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.lower.runtime.kernel_call import KernelCall

MakeCall = Callable[[Sequence[Any]], KernelCall | None]
"""Makes the call of a kernel from the types of tensors, and from the numbers, that its operator
takes; None where there is none for these."""

_MAKERS: dict[Any, MakeCall] = {}


def call_natively(operator: Any, make: MakeCall) -> None:
    """Let lowered graphs call an operator's kernel in the place of the operator.

    Args:
        operator: The operator, as graphs call it: with all of its arguments by position.
        make: Makes the call.
    """
    _MAKERS[operator] = make


def native_call(node: fx.Node) -> KernelCall | None:
    """Return the call of the kernel that a node's operator has, or None."""
    make = _MAKERS.get(node.target) if node.op == "call_function" else None
    if make is None or node.kwargs:
        return None
    values = [type_of(a) if isinstance(a, fx.Node) else a for a in node.args]
    is_known = all(isinstance(v, (TensorType, int, float)) for v in values)
    return make(values) if is_known else None
