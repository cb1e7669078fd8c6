"""The whole range that was seen."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fxkit.quantization.observers.kept_range import KeptRange


class MinMaxObserver(KeptRange):
    """Keeps the least and the largest value; outliers widen the range of all."""

    label: ClassVar[str] = "min_max"

    def joined(
        self, kept: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], share: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the range that holds both."""
        return torch.minimum(kept[0], new[0]), torch.maximum(kept[1], new[1])
