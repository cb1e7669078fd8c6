"""Axes have two names: of a matrix, `dim=-1` is `dim=1`; two change places in any order."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxkit.ir.attributes import type_of_operand
from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType

_AXES = frozenset("dim dim0 dim1 dim2 dims dimension start_dim end_dim source destination".split())
_OF_LARGER_RESULT = {"aten.unsqueeze": 1, "aten.stack": 1, "aten.diag_embed": 1}
_OF_BROADCAST_RESULT = frozenset({"aten.cross", "aten.linalg_cross"})


def same_axes(key: str, wanted: Any, got: Any, node: fx.Node) -> bool:
    """Tell whether a pattern's axes, and those that a call is given, are the same ones.

    Args:
        key: Name of the argument.
        wanted: A number, or a list of them.
        got: What the call has there.
        node: The call; the rank of what it takes has to be known.
    """
    if key not in _AXES or type(wanted) not in (int, list, tuple):
        return False
    ones, others = (list(v) if isinstance(v, (list, tuple)) else [v] for v in (wanted, got))
    if len(ones) != len(others) or any(type(axis) is not int for axis in (*ones, *others)):
        return False
    rank = _rank(node)
    return rank is not None and all(
        -rank <= a < rank and -rank <= b < rank and a % rank == b % rank
        for a, b in zip(ones, others, strict=True)
    )


def same_swap(wanted: tuple[Any, Any], got: tuple[Any, Any], node: fx.Node) -> bool:
    """Tell whether the same two axes change places."""
    return any(
        all(a == b or same_axes("dim", a, b, node) for a, b in zip(wanted, pair, strict=True))
        for pair in (got, got[::-1])
    )


def _rank(node: fx.Node) -> int | None:
    """Return how many axes the axes of a call count through, one at least."""
    call = resolve(node)
    if call is None or call.name in _OF_BROADCAST_RESULT:
        return None
    operand = call.arguments.get("self", call.arguments.get("tensors"))
    if isinstance(operand, (list, tuple)):
        operand = operand[0] if operand else None
    known = type_of_operand(operand, node.graph)
    if not isinstance(known, TensorType):
        return None
    return max(len(known.shape) + _OF_LARGER_RESULT.get(call.name, 0), 1)
