"""Axes that are walked as several: where coordinates lie along them."""

from __future__ import annotations

import itertools

import pytest

from fxkit.lower.fusion.region_space import RegionSpace
from fxkit.lower.fusion.walked_axes import WalkedAxes, split
from fxkit.lower.loop_ir.index import Index, SplitAxis


def at(index: Index, point: tuple[int, ...]) -> int:
    return index.offset + sum(point[axis] * stride for axis, stride in index.axes)


def test_an_axis_that_is_walked_as_two_counts_as_one() -> None:
    factors = [[6], [4]]
    split(factors, SplitAxis(0, 3))
    axes = WalkedAxes(RegionSpace((6, 4)), factors)
    assert factors == [[2, 3], [4]]
    assert axes.sizes == [2, 3, 4]
    assert axes.of([0]) == [0, 1]
    assert axes.of([1, 0]) == [0, 1, 2]
    row, column = axes.place((0, 1))
    number = axes.number((0, 1))
    for point in itertools.product(range(2), range(3), range(4)):
        assert at(row, point) == 3 * point[0] + point[1]
        assert at(column, point) == point[2]
        assert at(number, point) == 4 * at(row, point) + at(column, point)


def test_what_has_no_axis_lies_at_the_beginning() -> None:
    axes = WalkedAxes(RegionSpace((1, 5)), [[1], [5]])
    assert axes.place((None, 0)) == (Index(), Index())


def test_there_has_to_be_an_axis_to_split() -> None:
    with pytest.raises(ValueError, match="expected one of the axes, got 2"):
        split([[2], [3]], SplitAxis(2, 1))
