"""Weights as integers, or as floats of fewer bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxkit.quantization.affine import QuantizationParameters, parameters_of, quantized_tensor
from fxkit.quantization.pair_safe import range_of_pairs
from fxkit.quantization.specs import TensorSpec


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A weight as integers, or as floats of fewer bits where its spec has a type of such.

    Attributes:
        integers: The stored elements, of the weight's shape; floats where its spec's type is one.
        parameters: One scale; or one for each channel; or [channels, groups].
        axis: The axis of channels.
        spec: How it is stored.
    """

    integers: Tensor
    parameters: QuantizationParameters
    axis: int
    spec: TensorSpec

    @classmethod
    def of(cls, weight: Tensor, axis: int, spec: TensorSpec) -> StoredWeight:
        """Return a weight as integers, with scales from its least and largest elements.

        Args:
            weight: Floating point, finite, any shape; for groups [channels, elements].
            axis: The axis of channels.
            spec: How it is stored.
        """
        parts = _in_groups(weight, spec)
        others = shared_axes(parts.ndim, axis, spec)
        low, high = parts.amin(others).double(), parts.amax(others).double()
        if spec.is_pair_safe:
            pairs = range_of_pairs(weight, axis, spec)
            high = high.maximum(pairs if spec.granularity == "per_channel" else pairs.amax())
        return cls.within(weight, axis, spec, parameters_of(low, high, spec))

    @classmethod
    def within(
        cls, weight: Tensor, axis: int, spec: TensorSpec, found: QuantizationParameters
    ) -> StoredWeight:
        """Return a weight as integers, with scales that are given.

        Args:
            weight: Floating point, finite, any shape; for groups [channels, elements].
            axis: The axis of channels.
            spec: How it is stored.
            found: Scales and zero points: one; or one for each channel; or [channels, groups].
        """
        parts = _in_groups(weight, spec)
        wide = _over(parts, found, shared_axes(parts.ndim, axis, spec))
        integers = quantized_tensor(parts, wide, spec).reshape(weight.shape)
        return cls(integers, found, axis, spec)

    def fits(self, weight: Tensor, axis: int, spec: TensorSpec) -> bool:
        """Tell whether these are integers for a weight of that shape, stored in that way."""
        return (self.integers.shape, self.axis, self.spec) == (weight.shape, axis, spec)

    def over_parts(self) -> QuantizationParameters:
        """Return scales and zero points that broadcast over the weight, or over its groups."""
        parts = _in_groups(self.integers, self.spec)
        return _over(parts, self.parameters, shared_axes(parts.ndim, self.axis, self.spec))

    def by_element(self) -> QuantizationParameters:
        """Return the scale and zero point of each element, in the weight's shape."""
        parts, wide = _in_groups(self.integers, self.spec), self.over_parts()
        scale, zeros = (
            one.expand(parts.shape).reshape(self.integers.shape)
            for one in (wide.scale, wide.zero_point)
        )
        return QuantizationParameters(scale, zeros)

    @property
    def is_packed(self) -> bool:
        """Whether the graph keeps two integers to a byte: 4 bits, in groups of even size."""
        spec = self.spec
        fits = spec.dtype == torch.int8 and spec.low >= -8 and spec.high <= 7
        is_even = spec.group_size is not None and spec.group_size % 2 == 0
        return fits and is_even and self.integers.ndim == 2

    @property
    def nbytes(self) -> int:
        """Bytes that the graph keeps: zero points only where they are not all 0."""
        zeros = self.parameters.zero_point
        zero_bytes = zeros.numel() if self.is_packed else zeros.nbytes
        integers = self.integers.nbytes // (2 if self.is_packed else 1)
        if not self.spec.has_scale:
            return integers
        stored = integers + self.parameters.scale.nbytes
        return stored + (zero_bytes if self.spec.scheme == "affine" else 0)

    def restored(self) -> Tensor:
        """Return the weight that the integers stand for, float64 of its shape."""
        wide = self.by_element()
        return (self.integers.double() - wide.zero_point) * wide.scale.double()


def _in_groups(values: Tensor, spec: TensorSpec) -> Tensor:
    """Return elements that share a scale along axes of their own: [channels, groups, size]."""
    return values.unflatten(1, (-1, spec.group_size)) if spec.group_size else values


def shared_axes(ndim: int, axis: int, spec: TensorSpec) -> list[int]:
    """Return the axes along which elements share a scale, of a weight in its groups.

    Args:
        ndim: Of the weight, whose groups lie along an axis of their own.
        axis: The axis of channels.
        spec: How it is stored.
    """
    if spec.granularity == "per_tensor":
        return list(range(ndim))
    if spec.granularity == "per_group":
        return [2]
    return [other for other in range(ndim) if other != axis]


def _over(
    parts: Tensor, found: QuantizationParameters, shared: list[int]
) -> QuantizationParameters:
    """Return scales and zero points that broadcast over the elements."""
    shape = [1 if axis in shared else size for axis, size in enumerate(parts.shape)]
    return QuantizationParameters(found.scale.reshape(shape), found.zero_point.reshape(shape))
