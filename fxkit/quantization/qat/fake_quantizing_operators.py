"""Fake quantisation as operators of torch: one node each in a graph, with gradients.

They are composite: eager, autograd and what traces for gradients see what they are made of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxkit.ir.compositions import declare_composition
from fxkit.quantization.affine import LEAST_SCALE, parameters_of
from fxkit.quantization.pair_safe import range_of_pairs
from fxkit.quantization.specs import TensorSpec

_BOUNDS = "int quant_min, int quant_max, bool is_symmetric"


@functools.cache
def fake_quantizing_operators() -> Any:
    """Return the namespace of the operators, registered."""
    library = torch.library.Library("fxkit", "FRAGMENT")
    _kept.append(library)
    for schema, function in _DEFINITIONS.items():
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, function, "CompositeImplicitAutograd")
        declare_composition(getattr(torch.ops.fxkit, name).default, function, in_kernels=True)
    return torch.ops.fxkit


def within_range(
    values: Tensor,
    low: Tensor,
    high: Tensor,
    quant_min: int,
    quant_max: int,
    is_symmetric: bool,
    waits: bool,
) -> Tensor:
    """Fake-quantise with a range; where it `waits`, a range of nothing leaves values as they are.

    Args:
        values: Floating point, any shape.
        low: float64[], the least value of the range.
        high: float64[], the largest.
        quant_min: The least integer.
        quant_max: The largest.
        is_symmetric: Whether zero stands in the middle.
        waits: Whether the range may not be there yet.
    """
    spec = _spec(quant_min, quant_max, is_symmetric)
    found = parameters_of(low, high, spec)
    rounded = _rounded(spec, values, found.scale, found.zero_point)
    return rounded.where(low < high, values) if waits else rounded


def moving_range(
    values: Tensor,
    low: Tensor,
    high: Tensor,
    momentum: Tensor,
    quant_min: int,
    quant_max: int,
    is_symmetric: bool,
    settled: float | None,
) -> Tensor:
    """Let a range move towards that of the values, and fake-quantise with it.

    Args:
        values: Floating point, any shape, with elements.
        low: float64[], the least value of the range, which is written.
        high: float64[], the largest, which is written.
        momentum: float64[], how far it moves.
        quant_min: The least integer.
        quant_max: The largest.
        is_symmetric: Whether zero stands in the middle.
        settled: What the momentum becomes after the first step, which is the whole way; or None.
    """
    # What is not finite is no part of a range, and 0 always is.
    seen = values.detach().nan_to_num(0.0, 0.0, 0.0)
    low.lerp_(seen.amin().double(), momentum)
    high.lerp_(seen.amax().double(), momentum)
    if settled is not None:
        momentum.clamp_(max=settled)
    waits = settled is not None
    return within_range(values, low, high, quant_min, quant_max, is_symmetric, waits)


def within_itself(
    values: Tensor,
    quant_min: int,
    quant_max: int,
    is_symmetric: bool,
    shared: list[int],
    group_size: int | None,
    pair_safe_axis: int | None = None,
) -> Tensor:
    """Fake-quantise with scales of the values' own range.

    Args:
        values: Floating point, any shape; for groups [channels, elements].
        quant_min: The least integer.
        quant_max: The largest.
        is_symmetric: Whether zero stands in the middle.
        shared: Axes along which values share a scale, of values in their groups.
        group_size: Elements of a group along the second axis, or None.
        pair_safe_axis: The axis of channels where scales are pair-safe, else None.
    """
    parts = values.unflatten(1, (-1, group_size)) if group_size else values
    seen = parts.detach()
    low, high = seen.amin(shared, keepdim=True), seen.amax(shared, keepdim=True)
    spec = _spec(quant_min, quant_max, is_symmetric)
    if pair_safe_axis is not None:
        low, high = low.double(), high.double()
        pairs = range_of_pairs(seen, pair_safe_axis, spec)
        high = high.maximum(pairs.view(high.shape) if high.numel() > 1 else pairs.amax())
    found = parameters_of(low, high, spec)
    rounded = _rounded(spec, parts, found.scale, found.zero_point)
    return rounded.flatten(1, 2) if group_size else rounded


def learned_steps(
    values: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    is_symmetric: bool,
    count: int,
    group_size: int | None,
) -> Tensor:
    """Fake-quantise with a step whose gradient is scaled as in the paper on LSQ, section 2.2.

    Args:
        values: Floating point, any shape; for groups [channels, elements].
        scale: float32, broadcasts over the values in their groups.
        zero_point: int64 of the same shape.
        quant_min: The least integer.
        quant_max: The largest.
        is_symmetric: Whether zero stands in the middle.
        count: Values that share a step.
        group_size: Elements of a group along the second axis, or None.
    """
    parts = values.unflatten(1, (-1, group_size)) if group_size else values
    step = positive(scale)
    slow = step * (1.0 / math.sqrt(count * max(quant_max, 1)))
    spec = _spec(quant_min, quant_max, is_symmetric)
    rounded = _rounded(spec, parts, slow + (step - slow).detach(), zero_point)
    return rounded.flatten(1, 2) if group_size else rounded


def positive(scale: Tensor) -> Tensor:
    """Return a step that can be divided by."""
    return scale.abs().clamp(min=LEAST_SCALE)


def _rounded(spec: TensorSpec, values: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Round to whole steps; straight-through gradients where what values round to is in range."""
    steps = values.float() * (1.0 / scale)
    low, high = spec.low - zero_point, spec.high - zero_point
    if spec.scheme == "symmetric":
        middle = (spec.low + spec.high + 1) // 2
        low, high = spec.low - middle, spec.high - middle
    # Half a step further: else the largest weight would be in range or not as its last bit is.
    steps = _within(steps, low - 0.5, high + 0.5)
    nearest = _within(steps.round(), low, high)
    whole = steps + (nearest - steps).detach()
    return (whole * scale).type_as(values)


def _within(steps: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Clamp to a range, whose ends have a gradient of 1.

    That of `torch.clamp` is 1, 0 or one half there, as the release of torch has it.
    """
    return torch.where(steps < low, low, torch.where(steps > high, high, steps))


@functools.cache
def _spec(quant_min: int, quant_max: int, is_symmetric: bool) -> TensorSpec:
    return TensorSpec(torch.int16, quant_min, quant_max, "symmetric" if is_symmetric else "affine")


_kept: list[torch.library.Library] = []  # one that is gone takes its operators with it

_DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    f"fake_quantize_within_range(Tensor values, Tensor low, Tensor high, {_BOUNDS}, bool waits) "
    "-> Tensor": within_range,
    "fake_quantize_moving_range(Tensor values, Tensor(a!) low, Tensor(b!) high, "
    f"Tensor(c!) momentum, {_BOUNDS}, float? settled) -> Tensor": moving_range,
    f"fake_quantize_within_itself(Tensor values, {_BOUNDS}, int[] shared, int? group_size, "
    "int? pair_safe_axis=None) -> Tensor": within_itself,
    f"fake_quantize_learned_steps(Tensor values, Tensor scale, Tensor zero_point, {_BOUNDS}, "
    "int count, int? group_size) -> Tensor": learned_steps,
}
