"""Scales and zero points of a range, and the numbers that are stored of a tensor with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxkit.quantization.specs import TensorSpec

LEAST_SCALE = torch.finfo(torch.float32).eps
"""As in torch's observers: a range of zeros gets it."""


@dataclass(frozen=True, eq=False)
class QuantizationParameters:
    """What stands beside the stored numbers of a tensor.

    Attributes:
        scale: float32, one number or one for each channel or group.
        zero_point: int64 of the same shape: the integer that stands for 0; 0 in floating point.
    """

    scale: Tensor
    zero_point: Tensor


def parameters_of(low: Tensor, high: Tensor, spec: TensorSpec) -> QuantizationParameters:
    """Return the scale and zero point with which a range is stored; 0 is always exact.

    Args:
        low: float64, the least value; several where several ranges have a scale each.
        high: float64 of the same shape, the largest.
        spec: Range of stored numbers and scheme.
    """
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    if spec.is_float:
        return _of_floats(torch.maximum(-low, high), spec)
    if spec.scheme == "symmetric":
        middle = (spec.low + spec.high + 1) // 2
        scale = torch.maximum(-low, high) / ((spec.high - spec.low) / 2)
        scale = scale.clamp(min=LEAST_SCALE)
        return QuantizationParameters(scale.float(), torch.full_like(scale, middle).long())
    scale = ((high - low) / (spec.high - spec.low)).clamp(min=LEAST_SCALE).float()
    zero_point = spec.low - (low / scale.double()).round()
    return QuantizationParameters(scale, zero_point.clamp(spec.low, spec.high).long())


def _of_floats(largest: Tensor, spec: TensorSpec) -> QuantizationParameters:
    """Return the scale with which the largest number is the largest finite one of a type."""
    zeros = torch.zeros_like(largest).long()
    if not spec.has_scale:
        return QuantizationParameters(torch.ones_like(largest).float(), zeros)
    normal = torch.finfo(torch.float32).tiny
    scale = (largest / spec.high).clamp(min=normal).where(largest > 0, LEAST_SCALE)
    return QuantizationParameters(scale.float(), zeros)


def quantized_tensor(
    values: Tensor, parameters: QuantizationParameters, spec: TensorSpec
) -> Tensor:
    """Return the integers of a tensor, with scales that broadcast over it; or floats of fewer bits.

    Floats saturate: what would round beyond the largest finite number is that number.

    Args:
        values: Floating point, finite.
        parameters: With scales of a shape that broadcasts.
        spec: Type and range of what is stored.
    """
    if spec.is_float:
        parts = values.float() / parameters.scale
        return parts.clamp_(float(spec.low), float(spec.high)).to(spec.dtype)
    steps = (values.float() * (1.0 / parameters.scale)).round_().add_(parameters.zero_point)
    return steps.clamp_(spec.low, spec.high).to(spec.dtype)


def signal_to_noise(exact: Tensor, other: Tensor) -> float:
    """Return the ratio of a signal's power to that of the difference, in dB; inf where they agree.

    Args:
        exact: The signal, any shape.
        other: What stands for it, of the same shape.
    """
    signal = float(exact.double().square().sum())
    noise = float((exact.double() - other.double()).square().sum())
    return decibels(signal, noise)


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of two powers in dB; inf without noise, -inf without a signal."""
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
