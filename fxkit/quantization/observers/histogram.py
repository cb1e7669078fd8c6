"""Histograms of values, and the ranges that they suggest."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fxkit.errors import UnsupportedError
from fxkit.quantization.observers.range_observer import RangeObserver

BINS = 8192
TAIL = 1e-4
"""The share of values that `percentile` leaves out, half of it at either end."""

_TRIES = 33
"""Places that are tried for an end of a range at a time."""


class HistogramObserver(RangeObserver):
    """Counts values in bins that are symmetric about 0 and grow by powers of two.

    Growing joins whole bins, so that what was counted before stays exact, and the histogram of two
    halves of the data is that of the whole.
    """

    def __init__(self, bits: int = 8, axis: int | None = None) -> None:
        if axis is not None:
            raise UnsupportedError(
                f"expected one range for {self.label}, got one for each channel",
                hint='use observer="min_max" for channels',
            )
        super().__init__(bits, axis)
        self.counts = torch.zeros(BINS, dtype=torch.float64)
        self.exponent: int | None = None
        self.low = torch.tensor(torch.inf, dtype=torch.float64)
        self.high = torch.tensor(-torch.inf, dtype=torch.float64)

    def watch(self, values: Tensor, finite: Tensor) -> None:
        """Count values, in wider bins when they have to be."""
        values = values.flatten() if finite.all() else values[finite]
        values = values.cpu()
        self.low, self.high = self._extremes(values.amin(), values.amax())
        largest = float(values.abs().amax())
        _, needed = torch.frexp(torch.tensor(max(largest, 1e-300), dtype=torch.float64))
        self._grow(int(needed))
        bound = self.bound
        places = ((values + bound) * (BINS / (2 * bound))).long().clamp(0, BINS - 1)
        self.counts += torch.bincount(places, minlength=BINS).double()

    @property
    def bound(self) -> float:
        """The histogram reaches from minus this to this."""
        return 2.0 ** (self.exponent or 0)

    @property
    def centres(self) -> Tensor:
        """float64[BINS], the middle of each bin."""
        width = 2 * self.bound / BINS
        return torch.arange(BINS, dtype=torch.float64) * width - self.bound + width / 2

    def _extremes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.minimum(self.low, low), torch.maximum(self.high, high)

    def _grow(self, exponent: int) -> None:
        self.exponent = exponent if self.exponent is None else self.exponent
        self.counts = _widened(self.counts, exponent - self.exponent)
        self.exponent = max(self.exponent, exponent)

    def merge_state(self, other: RangeObserver) -> None:
        """Add the counts of another histogram."""
        assert isinstance(other, HistogramObserver) and other.exponent is not None
        self._grow(other.exponent)
        assert self.exponent is not None
        self.counts += _widened(other.counts, self.exponent - other.exponent)
        self.low, self.high = self._extremes(other.low, other.high)

    def found(self) -> tuple[Tensor, Tensor]:
        """Return the range that the histogram suggests, within what was seen."""
        low, high = self.suggested()
        return low.clamp(min=self.low).reshape(1), high.clamp(max=self.high).reshape(1)

    def suggested(self) -> tuple[Tensor, Tensor]:
        """Return a range, float64[] each; one without a rule of its own keeps all."""
        return self.low, self.high


def _widened(counts: Tensor, times: int) -> Tensor:
    """Return a histogram whose bins are twice as wide, so many times."""
    for _ in range(times):
        inner = counts.reshape(BINS // 2, 2).sum(1)
        counts = torch.zeros_like(counts)
        counts[BINS // 4 : BINS // 4 + BINS // 2] = inner
    return counts


class PercentileObserver(HistogramObserver):
    """Leaves out a ten-thousandth of the values, half of it at either end."""

    label: ClassVar[str] = "percentile"

    def suggested(self) -> tuple[Tensor, Tensor]:
        """Return the bounds of the share that is kept."""
        share = self.counts.cumsum(0) / self.counts.sum()
        width = 2 * self.bound / BINS
        ends = torch.tensor([TAIL / 2, 1 - TAIL / 2], dtype=torch.float64)
        first, last = torch.searchsorted(share, ends).double()
        return first * width - self.bound, (last + 1) * width - self.bound


class LeastSquaresObserver(HistogramObserver):
    """Chooses the range whose integers have the least squared error.

    Either end moves towards 0 by itself: of what GELU returns, for one, few values are large, and
    many lie at the other end. What is worth 0 has no error, since 0 is always exact.
    Source: "Loss Aware Post-training Quantization", Nahshan et al., 2019, with p = 2.
    """

    label: ClassVar[str] = "mse"

    def suggested(self) -> tuple[Tensor, Tensor]:
        """Move the farther end to where the error is least, then the other one; then finer."""
        ends = torch.stack([self.low.clamp(max=0), self.high.clamp(min=0)])
        kept = torch.ones(2, dtype=torch.float64)
        farther = int(ends.abs().argmax())
        for reach in (1.0, 0.06):
            for side in (farther, 1 - farther):
                tried = kept.repeat(_TRIES, 1)
                near = float(kept[side])
                first, last = max(0.1, near - reach), min(1.0, near + reach)
                tried[:, side] = torch.linspace(first, last, _TRIES)
                kept = tried[self._errors(*(tried * ends).T).argmin()]
        return ends[0] * kept[0], ends[1] * kept[1]

    def _errors(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the squared error of each range over that of the bound, float32[ranges]."""
        is_seen = self.counts > 0
        share = (self.counts[is_seen] / self.counts.sum()).float()
        values = (self.centres[is_seen] / self.bound).float()
        low, high = (low / self.bound).float()[:, None], (high / self.bound).float()[:, None]
        levels = 2**self.bits - 1
        step = ((high - low) / levels).clamp(min=1e-12)
        first = (low / step).round()
        stored = (values / step).round_().clamp_(min=first, max=first + levels)
        return stored.mul_(step).sub_(values).square_() @ share


class EntropyObserver(HistogramObserver):
    """Chooses the range whose quantised distribution has the least relative entropy to the values'.

    Zeros, which any range holds exactly, are left out: ReLU makes so many that the range would
    follow them. Source: "8-bit Inference with TensorRT", Migacz, GTC 2017.
    """

    label: ClassVar[str] = "entropy"

    def suggested(self) -> tuple[Tensor, Tensor]:
        """Try symmetric ranges that end at each thirty-second bin."""
        magnitudes = self.counts[BINS // 2 :] + self.counts[: BINS // 2].flip(0)
        magnitudes[0] = magnitudes[0].clamp(max=magnitudes[1])
        levels = 2 ** (self.bits - 1)
        ends = range(levels, BINS // 2 + 1, 32)
        divergences = [_divergence(magnitudes, end, levels) for end in ends]
        best = min(range(len(divergences)), key=divergences.__getitem__)
        bound = torch.tensor(ends[best] * 2 * self.bound / BINS, dtype=torch.float64)
        return -bound, bound


def _divergence(counts: Tensor, end: int, levels: int) -> float:
    """Return the relative entropy of counts to what `levels` steps up to a bin keep of them."""
    kept = counts[:end].clone()
    kept[-1] += counts[end:].sum()
    places = torch.arange(end) * levels // end
    ones = (counts[:end] > 0).double()
    sums = torch.zeros(levels, dtype=torch.float64).index_add(0, places, counts[:end])
    filled = torch.zeros(levels, dtype=torch.float64).index_add(0, places, ones)
    spread = (sums / filled.clamp(min=1))[places] * ones
    if not float(spread.sum()):
        return torch.inf
    p, q = kept / kept.sum(), spread / spread.sum()
    is_lost = (p > 0) & (q == 0)
    q = q.where(~is_lost, 1e-9)
    return float((p * (p / q).log()).where(p > 0, 0).sum())
