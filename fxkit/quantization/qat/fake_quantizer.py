"""Quantise and dequantise in floating point, with gradients: what training sees of integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxkit.quantization.affine import QuantizationParameters, parameters_of
from fxkit.quantization.qat.fake_quantizing_operators import fake_quantizing_operators, positive
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
        axis: The axis of channels, of a weight.

    Attributes:
        pair_safe_axis: The axis of channels where scales are pair-safe, else None.
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
        axis: int = 0,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.pair_safe_axis = axis if spec.is_pair_safe else None
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
            return QuantizationParameters(positive(self.scale.detach()), self.zero_point)
        return parameters_of(self.low, self.high, self.spec)

    def by_channel(self) -> QuantizationParameters:
        """Return the same without axes of one element, as a `StoredWeight` has them."""
        found = self.found()
        shape = [n for a, n in enumerate(found.scale.shape) if a not in self.shared]
        return QuantizationParameters(found.scale.reshape(shape), found.zero_point.reshape(shape))

    def state(self, count: int) -> dict[str, Tensor]:
        """Return the tensors that its operator takes behind the values, by their names.

        Args:
            count: Elements of the values.
        """
        if self.learns:
            return {"scale": self.scale, "zero_point": self.zero_point}
        if not self.moves:
            return {}
        bounds = {"low": self.low, "high": self.high}
        return {**bounds, "momentum": self.momentum} if self.training and count else bounds

    def forward(self, values: Tensor) -> Tensor:
        """Return the values that integers stand for, of the same type and shape."""
        count = values.numel()
        operator, options = self.operator(count)
        return operator(values, *self.state(count).values(), *options)

    def operator(self, count: int) -> tuple[Any, tuple[Any, ...]]:
        """Return what computes it, and what that takes behind the values and the state.

        Args:
            count: Elements of the values.
        """
        spec, known = self.spec, fake_quantizing_operators()
        bounds = (spec.low, spec.high, spec.scheme == "symmetric")
        if self.learns:
            each = max(count // max(self.scale.numel(), 1), 1)
            return known.fake_quantize_learned_steps.default, (*bounds, each, spec.group_size)
        if not self.moves:
            options = (*bounds, list(self.shared), spec.group_size, self.pair_safe_axis)
            return known.fake_quantize_within_itself.default, options
        if not self.training or not count:
            return known.fake_quantize_within_range.default, (*bounds, self.waits)
        settled = self.options.momentum if self.waits else None
        return known.fake_quantize_moving_range.default, (*bounds, settled)


def range_of(found: QuantizationParameters, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Return a range of which `parameters_of` makes a scale and zero point, float64 each."""
    scale = found.scale.double()
    if spec.scheme == "symmetric":
        half = scale * ((spec.high - spec.low) / 2)
        return -half, half
    return scale * (spec.low - found.zero_point), scale * (spec.high - found.zero_point)
