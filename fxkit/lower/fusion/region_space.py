"""Where the values of a region live: which loop axis each dimension of each value runs along.

A region has one iteration space. A value inside it has *coordinates*: for each of its dimensions
the axis it runs along, or `ONE` for a dimension of size 1, or `kept(axis)` for a dimension that a
reduction shrank to 1. Views inside a region only change coordinates; they compute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fxkit.lower.loop_ir.loop_ir import Unfusable

ONE: int | None = None
Coordinates = tuple[int | None, ...]


def kept(axis: int) -> int:
    """Return the coordinate of a dimension that had run along `axis` until it was reduced to 1."""
    return ~axis


def is_axis(coordinate: int | None) -> bool:
    """Tell whether a coordinate runs along an axis."""
    return coordinate is not None and coordinate >= 0


@dataclass
class RegionSpace:
    """The iteration space of a region.

    Attributes:
        sizes: Size of each axis.
        reduced: The axes that reductions run along; None as long as there is no reduction.
        joints: Neighbouring axes that dimensions run along as one, some of them reduced, as the
            channels of a group are. Their coordinates are the numbers that follow the axes'.
    """

    sizes: tuple[int, ...]
    reduced: frozenset[int] | None = None
    joints: tuple[tuple[int, ...], ...] = ()
    _long_axes: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._long_axes = frozenset([a for a, size in enumerate(self.sizes) if size != 1])

    @property
    def points(self) -> int:
        """Number of points."""
        return math.prod(self.sizes)

    @property
    def identity(self) -> Coordinates:
        """Coordinates of a value whose dimensions are the axes."""
        return tuple(range(len(self.sizes)))

    def size(self, coordinate: int | None) -> int:
        """Return the size of a dimension with this coordinate."""
        return math.prod(self.sizes[axis] for axis in self.axes(coordinate))

    def axes(self, coordinate: int | None) -> tuple[int, ...]:
        """Return the axes that a dimension with this coordinate runs along."""
        if coordinate is None or coordinate < 0:
            return ()
        rank = len(self.sizes)
        return (coordinate,) if coordinate < rank else self.joints[coordinate - rank]

    def is_wide(self, coordinates: Coordinates) -> bool:
        """Tell whether a value has an element for each point of the space."""
        return self._long_axes <= {axis for c in coordinates for axis in self.axes(c)}

    def broadcast(self, operands: Iterable[Coordinates], shape: Sequence[int]) -> Coordinates:
        """Return the coordinates of a pointwise result.

        Args:
            operands: Coordinates of the operands inside the region.
            shape: Shape of the result.

        Raises:
            Unfusable: When the operands disagree, or the result has no place in the space.
        """
        rank = len(shape)
        result: list[int | None] = [ONE] * rank
        for coordinates in operands:
            for d, coordinate in enumerate(coordinates, rank - len(coordinates)):
                if coordinate is None:
                    continue
                if is_axis(coordinate) and is_axis(result[d]) and result[d] != coordinate:
                    raise Unfusable("it reads one value of a kernel in two orders of axes")
                if is_axis(coordinate) or result[d] is None:
                    result[d] = coordinate
        return self.fit(result, shape)

    def fit(self, coordinates: Sequence[int | None], shape: Sequence[int]) -> Coordinates:
        """Give an axis to each dimension that is longer than its coordinate says.

        Raises:
            Unfusable: When there is no such axis, or the value is neither wide nor a row scalar.
        """
        result = list(coordinates)
        for d, (coordinate, size) in enumerate(zip(coordinates, shape, strict=True)):
            if size == 1 or (is_axis(coordinate) and self.size(coordinate) == size):
                continue
            result[d] = self._missing_axis(coordinate, size, result)
        self._check_level(result)
        return tuple(result)

    def _missing_axis(self, coordinate: int | None, size: int, taken: Sequence[int | None]) -> int:
        if coordinate is not None and coordinate < 0 and self.sizes[~coordinate] == size:
            return ~coordinate
        free = [a for a in self.reduced or () if self.sizes[a] == size and a not in taken]
        if coordinate is None and len(free) == 1:
            return free[0]
        raise Unfusable("its shape is not that of its neighbours")

    def _check_level(self, coordinates: Sequence[int | None]) -> None:
        used = [axis for c in coordinates for axis in self.axes(c)]
        axes = {a for a in used if a in self._long_axes}
        if len(set(used)) != len(used):
            raise Unfusable("two of its dimensions run along one axis")
        if axes == self._long_axes:
            return
        if self.reduced is not None and axes == self._long_axes - self.reduced:
            return
        raise Unfusable("its shape is not that of its neighbours")

    def reduce(self, coordinates: Coordinates, dims: Sequence[int], keepdim: bool) -> Coordinates:
        """Return the coordinates of a reduction's result, and fix the axes that are reduced.

        Raises:
            Unfusable: When the operand is no full row, or the region reduces other axes already.
        """
        axes = frozenset(axis for d in dims for axis in self.axes(coordinates[d]))
        if not self.is_wide(coordinates):
            raise Unfusable("it reduces what was reduced before")
        self.reduce_along(axes)
        if keepdim:
            return tuple(
                kept(c) if d in dims and c is not None and c >= 0 else c
                for d, c in enumerate(coordinates)
            )
        return tuple(c for d, c in enumerate(coordinates) if d not in dims)

    def reduce_along(self, axes: frozenset[int]) -> None:
        """Fix the axes that are reduced.

        Raises:
            Unfusable: When the region reduces other axes already, or these are single elements.
        """
        axes &= self._long_axes
        if not axes:
            raise Unfusable("it reduces single elements")
        if self.reduced is not None and axes != self.reduced & self._long_axes:
            raise Unfusable("it reduces along other axes than its neighbours")
        self.reduced = axes if self.reduced is None else self.reduced
