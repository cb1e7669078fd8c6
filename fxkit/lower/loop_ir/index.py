"""Where an element of a tensor is read: a number for each dimension, linear in the loop axes.

Views, slices, paddings and gathers all come down to arithmetic on these numbers, so none of them
computes anything in a kernel that only follows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from fxkit.lower.loop_ir.loop_ir import Unfusable


class SplitAxis(Exception):
    """An axis that must be walked as two before an index can be divided.

    Attributes:
        axis: The axis.
        inner: Size of its inner part.
    """

    def __init__(self, axis: int, inner: int) -> None:
        super().__init__(axis, inner)
        self.axis = axis
        self.inner = inner


@dataclass(frozen=True, slots=True)
class Index:
    """The number `offset + sum(coefficient * axis) + sum(scale * value)`.

    Attributes:
        axes: Axes with their coefficients, none of them 0, in order.
        offset: What is added.
        values: Positions of integer values in the kernel's body, with their scales.
    """

    axes: tuple[tuple[int, int], ...] = ()
    offset: int = 0
    values: tuple[tuple[int, int], ...] = ()

    @classmethod
    def along(cls, axes: Mapping[int, int]) -> Self:
        """Return the sum of axes times coefficients."""
        return cls(tuple(sorted([(a, c) for a, c in axes.items() if c])))

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.axes, self.offset + other, self.values)
        return Index(
            _merged(self.axes, other.axes),
            self.offset + other.offset,
            _merged(self.values, other.values),
        )

    def __sub__(self, other: int) -> Index:
        return self + -other

    def __rsub__(self, other: int) -> Index:
        return self * -1 + other

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        if factor == 1:
            return self
        return Index(
            tuple([(a, c * factor) for a, c in self.axes]),
            self.offset * factor,
            tuple([(v, c * factor) for v, c in self.values]),
        )

    def strides(self, rank: int) -> tuple[int, ...]:
        """Return a coefficient for each of `rank` axes."""
        known = dict(self.axes)
        return tuple([known.get(axis, 0) for axis in range(rank)])

    def bounds(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """Return its smallest and largest value over axes of these sizes; None if not known."""
        if self.values:
            return None
        spans = [c * (sizes[a] - 1) for a, c in self.axes]
        return (
            self.offset + sum(s for s in spans if s < 0),
            self.offset + sum(s for s in spans if s > 0),
        )

    def divided(self, by: int, sizes: Sequence[int]) -> tuple[Index, Index]:
        """Return the quotient and the rest of a division, rounded down.

        Raises:
            SplitAxis: When they are no sums of axes until an axis is walked as two.
            Unfusable: When they are not, however axes are split.
        """
        if by == 1:
            return self, Index()
        parts = [(a, abs(c) // by * (1 if c > 0 else -1), c) for a, c in self.axes]
        far = tuple((a, q) for a, q, _ in parts if q)
        near = Index(tuple((a, c - q * by) for a, q, c in parts if c != q * by), self.offset)
        shift = 0
        found = near.bounds(sizes)
        if found is not None and not 0 <= found[0] <= found[1] < by:
            shift = found[0] // by
            near = near - shift * by
            found = near.bounds(sizes)
        if self.values or found is None:
            raise Unfusable("it regroups dimensions that are indexed by values")
        if found[1] < by:
            return Index(far, shift), near
        self._split(near, by, sizes)
        raise Unfusable("it regroups dimensions as no sum of loop axes does")

    def _split(self, near: Index, by: int, sizes: Sequence[int]) -> None:
        """Ask for the axis to be split that walks over multiples of `by`, if there is one."""
        for axis, coefficient in near.axes:
            inner = by // coefficient if coefficient > 0 and by % coefficient == 0 else 0
            if inner and sizes[axis] > inner and sizes[axis] % inner == 0:
                raise SplitAxis(axis, inner)


def _merged(
    a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    if not a or not b:
        return a or b
    total: dict[int, int] = {}
    for key, factor in (*a, *b):
        total[key] = total.get(key, 0) + factor
    return tuple(sorted([(k, c) for k, c in total.items() if c]))


def row_major(sizes: Sequence[int]) -> list[int]:
    """Return the number of elements that lie between neighbours along each dimension."""
    strides, below = [], 1
    for size in reversed(sizes):
        strides.append(below)
        below *= size
    return strides[::-1]


def numbered(number: Index, shape: Sequence[int], sizes: Sequence[int]) -> tuple[Index, ...]:
    """Return the index of the element that has a number, counted through a shape row by row.

    Raises:
        SplitAxis: See `Index.divided`.
        Unfusable: See `Index.divided`.
    """
    result: list[Index] = []
    for size in reversed(shape[1:]):
        number, rest = number.divided(size, sizes) if size > 1 else (number, Index())
        result.append(rest)
    if shape:
        result.append(number if shape[0] > 1 else Index())
    return tuple(reversed(result))
