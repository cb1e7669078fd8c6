"""Neighbours along an axis become lanes."""

from __future__ import annotations

from fxkit.lower.scheduling.gpu.split_lanes import SplitLanes
from tests.lower.scheduling.nests import before_and_after, doubled


def test_neighbours_become_lanes_of_which_the_last_tile_has_fewer() -> None:
    before, after = before_and_after(doubled(41), SplitLanes)
    assert "lanes" not in str(before)
    assert (
        str(after)
        == """\
parallel j_tile < 11:
  j = j_tile * 4
  count = 41 - j
  lanes l < 4 if l < count:
    %0: f32 = load in0[1]
    %2: f32 = mul %0, 2.0
    store out0[1] %2"""
    )


def test_lanes_are_not_counted_where_all_are_there() -> None:
    _, after = before_and_after(doubled(3, 8), SplitLanes)
    assert "lanes l < 4:" in str(after)
    assert "count" not in str(after)


def test_memory_that_is_not_aligned_is_accessed_by_elements() -> None:
    before, after = before_and_after(doubled(3, 8), SplitLanes, is_aligned=False)
    assert after == before
