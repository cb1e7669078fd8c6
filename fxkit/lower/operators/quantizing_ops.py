"""Quantisation: rows that make integers of numbers and back, or round as if they did."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators import movement_table, scalar_table
from fxkit.lower.operators.movement_table import Point
from fxkit.lower.operators.reduction_table import Arguments, IterationDomain, Shape, over_domain
from fxkit.lower.operators.scalar_table import Computes, call, select

# Eager converts to integers of 64 bits; larger numbers become the lowest one.
_INTEGERS = 2.0**63


@scalar_table.row("aten.fake_quantize_per_tensor_affine")
def _per_tensor(self: Ref, *, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Ref:
    if self.dtype != torch.float32:
        raise Unfusable("eager computes it in other steps for this dtype")
    step, inverse = float32_steps(scale)
    level = call("rint", self * inverse) + float(zero_point)
    return (_clamped(level, quant_min, quant_max) - float(zero_point)) * step


@movement_table.move("aten.fake_quantize_per_channel_affine", checks=True)
def _per_channel(
    p: Point, self: Any, scale: Any, zero_point: Any, *, axis: int, quant_min: int, quant_max: int
) -> Ref:
    return _of_channel(p, self, scale, zero_point, axis, quant_min, quant_max)[0]


@scalar_table.row("quantized_decomposed.quantize_per_tensor", computes=Computes.OWN)
def _quantize(
    input: Ref, *, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Ref:
    value = input.cast(torch.float32)
    level = call("rint", value * ctypes.c_float(1.0 / scale).value)
    if zero_point:
        level = level + float(zero_point)
    clamped = _clamped(level, quant_min, quant_max)
    if quant_min == 0:  # which is what NaN becomes, too
        return clamped.cast(dtype)
    return select(level.differs(level), 0.0, clamped).cast(dtype)  # NaN becomes 0


@scalar_table.row("quantized_decomposed.dequantize_per_tensor", computes=Computes.OWN)
def _dequantize(input: Ref, *, scale: float, zero_point: int) -> Ref:
    return (input.cast(torch.float32) - float(zero_point)) * ctypes.c_float(scale).value


@movement_table.move("quantized_decomposed.dequantize_per_channel")
def _dequantize_channels(p: Point, input: Any, scales: Any, zero_points: Any, *, axis: int) -> Ref:
    place = (p.index[axis % len(p.shape)],)
    level = p.read(input, p.index).cast(torch.float32)
    if zero_points is not None:
        level = level - p.read(zero_points, place).cast(torch.float32)
    return level * p.read(scales, place)


def _whole(
    arguments: Arguments, shapes: Mapping[str, Shape], results: Sequence[Shape]
) -> IterationDomain:
    """Run over all elements, for two results."""
    axes = tuple(range(len(results[0])))
    return IterationDomain(tuple(results[0]), (), (axes, axes))


@over_domain(
    "aten.fake_quantize_per_channel_affine_cachemask", domain=_whole, checks=True, tolerance=0
)  # fmt: skip
def _per_channel_with_mask(
    p: Point, self: Any, scale: Any, zero_point: Any, *, axis: int, quant_min: int, quant_max: int
) -> tuple[Ref, ...]:
    return _of_channel(p, self, scale, zero_point, axis, quant_min, quant_max)


def _of_channel(
    p: Point, self: Any, scale: Any, zero_point: Any, axis: int, quant_min: int, quant_max: int
) -> tuple[Ref, Ref]:
    """Return a quantised element, and whether it was within bounds, where its gradient passes."""
    if p.dtype != torch.float32:
        raise Unfusable("eager computes it in other steps for this dtype")
    place = (p.index[axis % len(p.shape)],)
    step, zero = p.read(scale, place), p.read(zero_point, place)
    p.require((zero >= float(quant_min)) & (zero <= float(quant_max)))
    level = zero + call("rint", p.read(self, p.index) * (1.0 / step))
    is_within = (level >= float(quant_min)) & (level <= float(quant_max))
    is_integer = call("abs", level) < _INTEGERS
    lowest = p.number(float(quant_min))
    level = select(is_integer, _clamped(level, quant_min, quant_max), lowest)
    return (level - zero) * step, is_within


def float32_steps(scale: float) -> tuple[float, float]:
    """Return a scale and its inverse as eager has them, in float32."""
    step = ctypes.c_float(scale).value
    return step, ctypes.c_float(1.0 / step).value if step else math.inf


def _clamped(level: Ref, low: int, high: int) -> Ref:
    """Return a level within bounds; the lowest one for NaN."""
    level = select(level > float(low), level, float(low))
    return select(level < float(high), level, float(high))
