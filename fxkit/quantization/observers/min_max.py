"""The whole range that was seen."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fxkit.quantization.observers.range_observer import RangeObserver, extremes


class MinMaxObserver(RangeObserver):
    """Keeps the least and the largest value; outliers widen the range of all."""

    label: ClassVar[str] = "min_max"

    def __init__(self, bits: int = 8, axis: int | None = None) -> None:
        super().__init__(bits, axis)
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def watch(self, values: Tensor, finite: Tensor) -> None:
        """Widen the range."""
        self._widen(*extremes(values, finite))

    def _widen(self, low: Tensor, high: Tensor) -> None:
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def found(self) -> tuple[Tensor, Tensor]:
        """Return the range."""
        assert self.low is not None and self.high is not None
        seen = self.low <= self.high
        return self.low.where(seen, 0), self.high.where(seen, 0)

    def merge_state(self, other: RangeObserver) -> None:
        """Widen the range by another's."""
        assert isinstance(other, MinMaxObserver) and other.low is not None
        assert other.high is not None
        self._widen(other.low, other.high)
