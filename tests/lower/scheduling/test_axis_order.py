"""Axes that every access walks as one are one axis."""

from __future__ import annotations

from fxkit.lower.scheduling.axis_order import distinct_axes


def test_axes_that_every_access_walks_as_one_are_merged() -> None:
    contiguous, bias = (60, 20, 1), (0, 0, 1)
    assert distinct_axes([contiguous], (2, 3, 20)) == [[0, 1, 2]]
    assert distinct_axes([contiguous, bias], (2, 3, 20)) == [[0, 1], [2]]
    assert distinct_axes([(60, 1, 3)], (2, 3, 20)) == [[0], [1], [2]]
    assert distinct_axes([(20, 7, 1)], (2, 1, 20)) == [[0, 2]]
    assert distinct_axes([(1,)], (1,)) == []
