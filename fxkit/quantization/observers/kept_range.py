"""Base of observers that keep a range by channel, and nothing else."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from fxkit.quantization.observers.range_observer import RangeObserver, extremes


class KeptRange(RangeObserver):
    """Keeps the least and the largest value by channel; a subclass says what a batch does to them.

    Attributes:
        low: float64[channels]; None before the first value.
        high: float64[channels]; None before the first value.
    """

    def __init__(self, bits: int = 8, axis: int | None = None) -> None:
        super().__init__(bits, axis)
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def watch(self, values: Tensor, finite: Tensor) -> None:
        """Join the range with that of a batch."""
        self._join(*extremes(values, finite), share=None)

    def merge_state(self, other: RangeObserver) -> None:
        """Join the range with another observer's."""
        assert isinstance(other, KeptRange) and other.low is not None and other.high is not None
        self._join(other.low, other.high, share=other.count / (self.count + other.count))

    def found(self) -> tuple[Tensor, Tensor]:
        """Return the range; 0 for channels without any value."""
        assert self.low is not None and self.high is not None
        seen = self.low <= self.high
        return self.low.where(seen, 0), self.high.where(seen, 0)

    def _join(self, low: Tensor, high: Tensor, share: float | None) -> None:
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        else:
            self.low, self.high = self.joined((self.low, self.high), (low, high), share)

    @abstractmethod
    def joined(
        self, kept: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], share: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the range that two make.

        Args:
            kept: The range so far, [inf, -inf] where a channel had no value.
            new: Another one.
            share: The share of all values that the other range stands for; None for a batch.
        """
