"""The average of the ranges of batches, later ones weighing more."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fxkit.quantization.observers.kept_range import KeptRange

MOMENTUM = 0.01


class MovingAverageObserver(KeptRange):
    """Moves the range by a hundredth of the way to that of each batch, as torch's observer does.

    Merged observers are averaged by the number of values that they saw.
    """

    label: ClassVar[str] = "moving_average"

    def joined(
        self, kept: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], share: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the kept range, moved towards the new one; either alone where one has no value."""
        step = MOMENTUM if share is None else share
        is_new, is_kept = new[0] > new[1], kept[0] > kept[1]
        return tuple(  # type: ignore[return-value]
            (old + step * (other - old)).where(~(is_new | is_kept), other.where(is_kept, old))
            for old, other in zip(kept, new, strict=True)
        )
