"""The axes that a kernel walks: those of its region's space, some of them as several."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fxkit.lower.fusion.region_space import RegionSpace
from fxkit.lower.loop_ir.index import Index, SplitAxis, row_major


class WalkedAxes:
    """Where things of a region lie along the axes of its kernel.

    Args:
        space: The region's space.
        factors: For each axis of that, the sizes of the axes that walk it.

    Attributes:
        sizes: Size of each axis that is walked.
    """

    def __init__(self, space: RegionSpace, factors: Sequence[Sequence[int]]) -> None:
        self.sizes = [size for parts in factors for size in parts]
        self._space = space
        self._first = [0, *itertools.accumulate(map(len, factors))]
        self._places: dict[tuple[int, ...], Index] = {}

    def of(self, axes: Iterable[int]) -> list[int]:
        """Return the axes that walk some axes of the region's space."""
        first = self._first
        return sorted([a for axis in axes for a in range(first[axis], first[axis + 1])])

    def place(self, coordinates: Sequence[int | None]) -> tuple[Index, ...]:
        """Return where coordinates lie, as an index."""
        return tuple([self._along(self._space.axes(c)) for c in coordinates])

    def _along(self, axes: tuple[int, ...]) -> Index:
        """Return the place along axes of the region's space that are walked as one."""
        known = self._places.get(axes)
        if known is None:
            walked = self.of(axes)
            strides = row_major([self.sizes[a] for a in walked])
            known = self._places[axes] = Index.along(
                {a: s for a, s in zip(walked, strides, strict=True) if self.sizes[a] != 1}
            )
        return known

    def number(self, coordinates: Sequence[int | None]) -> Index:
        """Return the number of a place, counted through coordinates in order."""
        sizes = [self._space.size(coordinate) for coordinate in coordinates]
        found = Index()
        for one, stride in zip(self.place(coordinates), row_major(sizes), strict=True):
            found = found + one * stride
        return found


def split(factors: list[list[int]], wanted: SplitAxis) -> None:
    """Walk one axis as two."""
    axis = wanted.axis
    for parts in factors:
        if axis < len(parts):
            parts[axis : axis + 1] = [parts[axis] // wanted.inner, wanted.inner]
            return
        axis -= len(parts)
    raise ValueError(f"expected one of the axes, got {wanted.axis}")
