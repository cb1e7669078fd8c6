"""Operands that a quantised graph dequantises: what kernels of integers read in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.token_scales import NAMESPACE, Factor, is_float, is_float32

# Terms of so many products of 8 bits, moved by a zero point, fit into 32 bits whatever they are.
MOST_TERMS = (2**31 - 1) // (255 * 128)

_FLOAT32 = (torch.float32,)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def dequantizes(call: Call) -> bool:
    """Tell whether a call makes floats of integers."""
    return call.name.startswith(f"{NAMESPACE}dequantize")


def integers_of(value: Any, dtypes: tuple[torch.dtype, ...] = _FLOAT32) -> Factor | None:
    """Return what an activation was dequantised from with one scale, if kernels read it.

    Args:
        value: The activation.
        dtypes: What it may have been dequantised to.
    """
    call = resolve(value) if isinstance(value, fx.Node) else None
    if call is None or call.name != f"{NAMESPACE}dequantize_per_tensor":
        return None
    if not is_float(value, dtypes):
        return None
    integers = _operand(call, (torch.int8, torch.uint8))
    scale, zero = call.arguments["scale"], call.arguments["zero_point"]
    if integers is None or not isinstance(scale, float) or not isinstance(zero, int):
        return None
    limits = torch.iinfo(type_of(integers).dtype)  # type: ignore[union-attr]
    return Factor(integers, scale, zero) if limits.min <= zero <= limits.max else None


def floats_of(value: Any) -> Factor | None:
    """Return an activation that was not quantised, if it is one that a kernel reads."""
    serves = is_read_as(value, (torch.float32,)) and type_of(value).shape
    return Factor(value, 1.0, 0, is_float=True) if serves else None


def weight_of(
    value: Any, rank: int = 2, dtypes: tuple[torch.dtype, ...] = _FLOAT32
) -> Factor | None:
    """Return what a weight was dequantised from, if kernels read it.

    Args:
        value: The weight.
        rank: How many axes it has to have; scales are those of the first.
        dtypes: What it may have been dequantised to.
    """
    call = resolve(value) if isinstance(value, fx.Node) else None
    if call is None or not dequantizes(call) or not is_float(value, dtypes):
        return None
    integers = _operand(call, (torch.int8,))
    known = None if integers is None else type_of(integers)
    if integers is None or not isinstance(known, TensorType) or len(known.shape) != rank:
        return None
    arguments = call.arguments
    if call.name == f"{NAMESPACE}dequantize_per_tensor":
        is_plain = isinstance(arguments["scale"], float) and arguments["zero_point"] == 0
        return Factor(integers, arguments["scale"], 0) if is_plain else None
    is_by_row = call.name == f"{NAMESPACE}dequantize_per_channel"
    if not is_by_row or arguments["axis"] not in (0, -rank) or not is_float32(arguments["scales"]):
        return None
    zeros = arguments["zero_points"]
    if zeros is None:
        return Factor(integers, arguments["scales"], 0)
    given = type_of(zeros) if isinstance(zeros, fx.Node) else None
    is_integer = isinstance(given, TensorType) and given.dtype in _INTEGERS
    return Factor(integers, arguments["scales"], zeros) if is_integer else None


def is_read_as(node: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Tell whether a node is a tensor of one of some types that a product can read."""
    known = type_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(known, TensorType) or known.dtype not in dtypes or known.is_symbolic:
        return False
    return bool(known.stride is not None and known.numel)


def _operand(call: Call, dtypes: tuple[torch.dtype, ...]) -> fx.Node | None:
    """Return the integers that a call dequantises, if their type is known and serves."""
    node = call.arguments["input"]
    return node if is_read_as(node, dtypes) else None
