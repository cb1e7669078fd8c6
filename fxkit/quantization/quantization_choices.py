"""What algorithms chose for a prepared program: integers of weights, and corrections of biases."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fxkit.quantization.affine import QuantizationParameters
from fxkit.quantization.specs import TensorSpec
from fxkit.quantization.stored_weight import StoredWeight


@dataclass
class QuantizationChoices:
    """What algorithms chose for a prepared program, which `convert` puts into effect.

    Attributes:
        weights: Integers by the qualified names of weights; others have those nearest to them.
        biases: float64[channels] by the names of layers and of their weights: what is added to
            their results.
        scales: Scales and zero points by the names of weights, for which no integers were chosen.
    """

    weights: dict[str, StoredWeight] = field(default_factory=dict)
    biases: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    scales: dict[str, QuantizationParameters] = field(default_factory=dict)

    def copy(self) -> QuantizationChoices:
        """Return the same choices, to which others may be added."""
        return QuantizationChoices(dict(self.weights), dict(self.biases), dict(self.scales))

    def stored(self, path: str, weight: torch.Tensor, axis: int, spec: TensorSpec) -> StoredWeight:
        """Return a weight as integers: those that were chosen for it as it is stored, or others.

        Args:
            path: Its qualified name.
            weight: Floating point, finite.
            axis: The axis of channels.
            spec: How it is stored.
        """
        chosen = self.weights.get(path)
        if chosen is not None and chosen.fits(weight, axis, spec):
            return chosen
        known = self.scales.get(path)
        if known is not None:
            return StoredWeight.within(weight.detach(), axis, spec, known)
        return StoredWeight.of(weight.detach(), axis, spec)
