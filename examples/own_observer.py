"""An observer and a scheme of your own: a range that leaves lone outliers out, in seven bits.

Run it: python examples/own_observer.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxkit import quantization as q


class SpreadObserver(q.RangeObserver):
    """Keeps what lies within six mean distances from the mean: float64[channels] each."""

    def __init__(self, bits: int = 8, axis: int | None = None) -> None:
        super().__init__(bits, axis)
        self.seen = self.total = self.spread = torch.zeros(1, dtype=torch.float64)

    def watch(self, values: Tensor, finite: Tensor) -> None:
        """Add up values, and their distances from the mean of their batch."""
        kept = values.where(finite, 0)
        count = finite.sum(-1)
        mean = kept.sum(-1) / count.clamp(min=1)
        self.seen = self.seen + count
        self.total = self.total + kept.sum(-1)
        self.spread = self.spread + (values - mean[:, None]).abs().where(finite, 0).sum(-1)

    def found(self) -> tuple[Tensor, Tensor]:
        """Return the range."""
        mean, reach = self.total / self.seen, 6 * self.spread / self.seen
        return mean - reach, mean + reach

    def merge_state(self, other: q.RangeObserver) -> None:
        """Add what another process has seen."""
        assert isinstance(other, SpreadObserver)
        self.seen, self.total = self.seen + other.seen, self.total + other.total
        self.spread = self.spread + other.spread


def spec(observer: str | type[q.RangeObserver]) -> q.QuantizationSpec:
    """Return seven bits for activations and weights, so that sums of two products fit 16 bits."""
    activations = q.TensorSpec(torch.uint8, 0, 127, "affine", observer=observer)
    return q.QuantizationSpec(activations, q.TensorSpec(torch.int8, -63, 63, "symmetric"))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)).eval()
    batches = [(torch.randn(32, 64),) for _ in range(4)]
    batches[0][0][0, 0] = 200.0  # one lone outlier, which is not met again
    for observer in ("min_max", SpreadObserver):
        prepared = q.prepare(model, batches[0], spec(observer))
        q.calibrate(prepared, batches)
        print(observer, f"{q.report(q.convert(prepared), prepared, batches[1:]).sqnr[0]:.1f} dB")
