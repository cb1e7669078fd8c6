"""Quantise and dequantise in floating point, with gradients: what training sees of integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fxkit.quantization.affine import LEAST_SCALE, QuantizationParameters, parameters_of
from fxkit.quantization.specs import TensorSpec


@dataclass(frozen=True)
class FakeQuantizerOptions:
    """How scales are found while a program is trained.

    Attributes:
        learns_steps: Whether scales are parameters (LSQ), and follow no range.
        momentum: How far a range moves to that of each batch.
    """

    learns_steps: bool = False
    momentum: float = 0.01


class FakeQuantizer(nn.Module):
    """Rounds values to those that integers stand for; gradients pass where values are in range.

    Scales come from a range that moves towards that of each batch, from the values themselves, or
    are parameters. Source: "Quantizing deep convolutional networks for efficient inference",
    Krishnamoorthi, 2018; for parameters "Learned Step Size Quantization", Esser et al., 2020.

    Args:
        spec: Range of integers, scheme and groups.
        shared: Axes along which values share a scale, of values in groups where the spec has some.
        options: How scales are found.
        first: The scale and zero point to begin with, of a shape that broadcasts; None where each
            call finds its own.
        waits: Whether a range that moves begins with that of the first values in training; until
            then values stay as they are.

    Attributes:
        scale: float32, a parameter, where steps are learnt.
        zero_point: int64 beside it.
        low: float64[], the least value of the range, where it moves.
        high: float64[], the largest.
        momentum: float64[], how far it moves; 0 once it is frozen, 1 while it waits.
    """

    zero_point: Tensor
    low: Tensor
    high: Tensor
    momentum: Tensor

    def __init__(
        self,
        spec: TensorSpec,
        shared: tuple[int, ...],
        options: FakeQuantizerOptions,
        first: QuantizationParameters | None = None,
        *,
        waits: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.shared = shared
        self.options = options
        self.waits = waits
        self.learns = options.learns_steps and first is not None
        self.moves = waits or (first is not None and not self.learns)
        if waits:
            self._register_range(*torch.zeros(2, dtype=torch.float64))
        if first is None:
            return
        if self.learns:
            self.scale = nn.Parameter(first.scale.clone())
            self.register_buffer("zero_point", first.zero_point.clone())
            return
        self._register_range(*range_of(first, spec))

    def _register_range(self, low: Tensor, high: Tensor) -> None:
        momentum = 1.0 if self.waits else self.options.momentum
        self.register_buffer("low", low.clone())
        self.register_buffer("high", high.clone())
        self.register_buffer("momentum", torch.tensor(momentum, dtype=torch.float64))
        self._first = {name: value.clone() for name, value in self.named_buffers()}

    def restart(self) -> None:
        """Let a range that moves begin again."""
        if self.moves:
            for name, buffer in self.named_buffers():
                buffer.copy_(self._first[name])

    @property
    def is_waiting(self) -> bool:
        """Whether it has seen nothing yet."""
        return self.waits and bool(self.low == self.high)

    def freeze(self) -> None:
        """Keep the scale as it is from now on."""
        if self.learns:
            self.scale.requires_grad_(False)
        elif self.moves:
            self.momentum.zero_()

    def found(self) -> QuantizationParameters:
        """Return the scale and zero point of a range that moves, or of steps that are learnt."""
        if self.learns:
            return QuantizationParameters(_positive(self.scale.detach()), self.zero_point)
        return parameters_of(self.low, self.high, self.spec)

    def by_channel(self) -> QuantizationParameters:
        """Return the same without axes of one element, as a `StoredWeight` has them."""
        found = self.found()
        shape = [n for a, n in enumerate(found.scale.shape) if a not in self.shared]
        return QuantizationParameters(found.scale.reshape(shape), found.zero_point.reshape(shape))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that its formula takes beside the values, by their names."""
        names = ("scale", "zero_point") if self.learns else ("low", "high", "momentum")
        return {name: getattr(self, name) for name in names} if self.learns or self.moves else {}

    def forward(self, values: Tensor) -> Tensor:
        """Return the values that integers stand for, of the same type and shape."""
        return self.formula(values.numel())(values, **self.state())

    def formula(self, count: int) -> Callable[..., Tensor]:
        """Return what is computed, as a function of the values and of `state`, to be traced.

        Args:
            count: Elements of the values.
        """
        if self.learns:
            return partial(_learned, self.spec, max(count // max(self.scale.numel(), 1), 1))
        if self.moves:
            settled = self.options.momentum if self.waits else None
            return partial(_within_range, self.spec, self.training and count > 0, settled)
        return partial(_within_itself, self.spec, self.shared)


def _within_range(
    spec: TensorSpec,
    moves: bool,
    settled: float | None,
    values: Tensor,
    low: Tensor,
    high: Tensor,
    momentum: Tensor,
) -> Tensor:
    """Fake-quantise with a range that moves towards that of the values.

    Where `settled` is a number, the first step is the whole way, and those after it are of that.
    """
    if moves:
        # What is not finite is no part of a range, and 0 always is.
        seen = values.detach().nan_to_num(0.0, 0.0, 0.0)
        low.lerp_(seen.amin().double(), momentum)
        high.lerp_(seen.amax().double(), momentum)
        if settled is not None:
            momentum.clamp_(max=settled)
    found = parameters_of(low, high, spec)
    rounded = _rounded(spec, values, found.scale, found.zero_point)
    return rounded if settled is None else rounded.where(low < high, values)


def _within_itself(spec: TensorSpec, shared: tuple[int, ...], values: Tensor) -> Tensor:
    """Fake-quantise with scales of the values' own range."""
    parts = values.unflatten(1, (-1, spec.group_size)) if spec.group_size else values
    seen = parts.detach()
    low, high = seen.amin(shared, keepdim=True), seen.amax(shared, keepdim=True)
    found = parameters_of(low, high, spec)
    rounded = _rounded(spec, parts, found.scale, found.zero_point)
    return rounded.flatten(1, 2) if spec.group_size else rounded


def _learned(
    spec: TensorSpec, count: int, values: Tensor, scale: Tensor, zero_point: Tensor
) -> Tensor:
    """Fake-quantise with a step whose gradient is scaled as in the paper, section 2.2."""
    parts = values.unflatten(1, (-1, spec.group_size)) if spec.group_size else values
    step = _positive(scale)
    slow = step * (1.0 / math.sqrt(count * max(spec.high, 1)))
    rounded = _rounded(spec, parts, slow + (step - slow).detach(), zero_point)
    return rounded.flatten(1, 2) if spec.group_size else rounded


def _rounded(spec: TensorSpec, values: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Round to whole steps; straight-through gradients where values are in range."""
    steps = values.float() * (1.0 / scale)
    if spec.scheme == "symmetric":
        middle = (spec.low + spec.high + 1) // 2
        steps = steps.clamp(spec.low - middle, spec.high - middle)
    else:
        steps = steps.clamp(min=spec.low - zero_point, max=spec.high - zero_point)
    whole = steps + (steps.round() - steps).detach()
    return (whole * scale).type_as(values)


def _positive(scale: Tensor) -> Tensor:
    return scale.abs().clamp(min=LEAST_SCALE)


def range_of(found: QuantizationParameters, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Return a range of which `parameters_of` makes a scale and zero point, float64 each."""
    scale = found.scale.double()
    if spec.scheme == "symmetric":
        half = scale * ((spec.high - spec.low) / 2)
        return -half, half
    return scale * (spec.low - found.zero_point), scale * (spec.high - found.zero_point)
