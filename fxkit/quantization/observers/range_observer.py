"""What an observer is: it looks at values, and says which range of them to keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fxkit.errors import FxkitError, UnsupportedError


@dataclass(frozen=True)
class ValueRange:
    """The range of values that is kept, and what was odd about the values.

    Attributes:
        low: float64[] or float64[channels], the least.
        high: float64[] or float64[channels], the largest.
        notes: What a report should say: never run, not finite, constant.
    """

    low: Tensor
    high: Tensor
    notes: tuple[str, ...] = ()


class RangeObserver(nn.Module):
    """Base of all observers; a subclass implements `watch`, `found` and `merge_state`.

    Values that are not finite are counted and left out, and so are empty tensors.

    Args:
        bits: Bits that the integers will have: some choose a range by the error of rounding.
        axis: The axis of channels, which get a range each, or None for one range.

    Attributes:
        label: The name that a `TensorSpec` names it by; empty for a base class.
    """

    label: ClassVar[str] = ""

    def __init__(self, bits: int = 8, axis: int | None = None) -> None:
        super().__init__()
        self.bits = bits
        self.axis = axis
        self.count = 0
        self.not_finite = 0

    def forward(self, values: Tensor) -> None:
        """Look at a tensor of any floating-point type and shape."""
        values = values.detach()
        if not values.is_floating_point() or not values.numel():
            return
        values = self._by_channel(values.double())
        finite = values.isfinite()
        if not finite.all():
            self.not_finite += int((~finite).sum())
            if not finite.any():
                return
        self.count += values.numel()
        with _told_whose(self, "watch", "learn from values"):
            self.watch(values, finite)

    def _by_channel(self, values: Tensor) -> Tensor:
        """Return float64[channels, n], of one channel where there is one range."""
        if self.axis is None:
            return values.reshape(1, -1)
        return values.movedim(self.axis, 0).reshape(values.shape[self.axis], -1)

    def watch(self, values: Tensor, finite: Tensor) -> None:
        """Learn from values.

        Args:
            values: float64[channels, n], n > 0.
            finite: bool[channels, n], which of them count; at least one does.
        """
        raise TypeError(f"{type(self).__name__} has no method watch")

    def found(self) -> tuple[Tensor, Tensor]:
        """Return the range by channel, float64[channels] each; some value was seen."""
        raise TypeError(f"{type(self).__name__} has no method found")

    def merge_state(self, other: RangeObserver) -> None:
        """Learn what another observer of the same class and options has learnt."""
        raise TypeError(f"{type(self).__name__} has no method merge_state")

    def merge(self, other: RangeObserver) -> None:
        """Add what another observer has seen, so that calibration can be shared out.

        Raises:
            UnsupportedError: When the other one is of another class or has other options.
        """
        if type(other) is not type(self) or (self.bits, self.axis) != (other.bits, other.axis):
            raise UnsupportedError(
                f"expected an observer like {type(self).__name__}(bits={self.bits}, "
                f"axis={self.axis}), got {type(other).__name__}(bits={other.bits}, "
                f"axis={other.axis})"
            )
        self.not_finite += other.not_finite
        if other.count:
            with _told_whose(self, "merge_state", f"learn from another {type(self).__name__}"):
                self.merge_state(other)
            self.count += other.count

    def value_range(self) -> ValueRange:
        """Return the range to keep; [0, 0] where no finite value was seen.

        Raises:
            UnsupportedError: When `found` fails, or returns something else than a range.
        """
        notes = (f"{self.not_finite} values are not finite",) if self.not_finite else ()
        if not self.count:
            zero = torch.zeros((), dtype=torch.float64)
            return ValueRange(zero, zero, ("no value was seen in calibration", *notes))
        with _told_whose(self, "found", "return a range"):
            low, high = (torch.as_tensor(end, dtype=torch.float64) for end in self.found())
        self._check(low, high)
        if self.axis is None:
            low, high = low.reshape(()), high.reshape(())
        if bool(((low == high) & (low == 0)).any()):
            notes = (*notes, "all values are 0")
        return ValueRange(low, high, notes)

    def _check(self, low: Tensor, high: Tensor) -> None:
        sizes = (low.numel(), high.numel())
        is_one = sizes == (1, 1) if self.axis is None else low.shape == high.shape and low.ndim == 1
        if is_one and bool((low <= high).all()) and bool((low.isfinite() & high.isfinite()).all()):
            return
        what = "one number each" if self.axis is None else "float64[channels] each"
        told = " and ".join(
            f"{float(end):g}" if end.numel() == 1 else str(list(end.shape)) for end in (low, high)
        )
        raise UnsupportedError(
            f"expected {type(self).__name__}.found to return the least and the largest value, "
            f"{what}, finite and in this order, got {told}"
        )


@contextlib.contextmanager
def _told_whose(observer: RangeObserver, method: str, does: str) -> Iterator[None]:
    """Say which method of an observer failed.

    Raises:
        UnsupportedError: When it raises, but for fxkit's own errors.
    """
    try:
        yield
    except FxkitError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"expected {type(observer).__name__}.{method} to {does}, "
            f"got {type(error).__name__}: {error}",
            hint="its base, RangeObserver, tells what it is given and what it returns",
        ) from error


def extremes(values: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest finite value by channel, float64[channels] each.

    A channel without any has the range [inf, -inf], which any other one replaces.
    """
    infinity = torch.inf
    return (
        values.where(finite, infinity).amin(-1),
        values.where(finite, -infinity).amax(-1),
    )
