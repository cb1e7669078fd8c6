"""Weights that a graph stores as floats of fewer bits: buffers of float8 or bfloat16, cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve

CASTS = frozenset(("aten.to", "aten._to_copy", "prims.convert_element_type"))
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_widened(node: fx.Node) -> bool:
    """Tell whether a node makes a tensor of a stored one of fewer bits, by a cast and its scale.

    That is `aten.to(stored, dtype)` of a wider type, for float8 also its product with a number or
    a buffer, and what casts that to another type.
    """
    return _stored(node) is not None


def _stored(node: Any) -> torch.dtype | None:
    """Return the type of the buffer that a node widens, or None where it is no such node."""
    call = resolve(node) if isinstance(node, fx.Node) else None
    if call is None:
        return None
    if call.name in CASTS:
        operand = call.arguments.get("self", call.arguments.get("a"))
        narrow = _buffer(operand)
        if narrow is None:
            scaled = isinstance(operand, fx.Node) and _is_product(operand)
            return _stored(operand) if scaled else None
        dtype = call.arguments.get("dtype")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return None
        return narrow if dtype.itemsize > narrow.itemsize else None
    if not _is_product(node):
        return None
    other = call.arguments["other"]
    is_scale = isinstance(other, float) or (isinstance(other, fx.Node) and other.op == "get_attr")
    found = _stored(call.arguments["self"]) if is_scale else None
    return found if found in FLOAT8 else None


def _is_product(node: fx.Node) -> bool:
    call = resolve(node)
    return call is not None and call.name == "aten.mul"


def _buffer(node: Any) -> torch.dtype | None:
    """Return the type of a buffer of float8 or bfloat16 that a node reads."""
    gm = node.graph.owning_module if isinstance(node, fx.Node) else None
    if gm is None or node.op != "get_attr":
        return None
    value = find_attribute(gm, str(node.target))
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return None
    return value.dtype if value.dtype in (*FLOAT8, torch.bfloat16) else None
