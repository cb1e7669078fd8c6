"""The average of the ranges of batches, later ones weighing more."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fxkit.quantization.observers.range_observer import RangeObserver, extremes

MOMENTUM = 0.01


class MovingAverageObserver(RangeObserver):
    """Moves the range by a hundredth of the way to that of each batch, as torch's observer does.

    Merged observers are averaged by the number of values that they saw.
    """

    label: ClassVar[str] = "moving_average"

    def __init__(self, bits: int = 8, axis: int | None = None) -> None:
        super().__init__(bits, axis)
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def watch(self, values: Tensor, finite: Tensor) -> None:
        """Move the range towards that of a batch."""
        low, high = extremes(values, finite)
        has_none = low > high
        if self.low is None or self.high is None:
            self.low, self.high = low.where(~has_none, 0), high.where(~has_none, 0)
            return
        self.low = self.low + MOMENTUM * (low.where(~has_none, self.low) - self.low)
        self.high = self.high + MOMENTUM * (high.where(~has_none, self.high) - self.high)

    def found(self) -> tuple[Tensor, Tensor]:
        """Return the averages."""
        assert self.low is not None and self.high is not None
        return self.low, self.high

    def merge_state(self, other: RangeObserver) -> None:
        """Average the two, weighed by what they saw."""
        assert isinstance(other, MovingAverageObserver)
        assert other.low is not None and other.high is not None
        if self.low is None or self.high is None:
            self.low, self.high = other.low, other.high
            return
        share = other.count / (self.count + other.count)
        self.low = self.low + share * (other.low - self.low)
        self.high = self.high + share * (other.high - self.high)
