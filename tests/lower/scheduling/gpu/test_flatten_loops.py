"""Loops that hold nothing but each other become one."""

from __future__ import annotations

from fxkit.lower.scheduling.gpu.flatten_loops import FlattenLoops
from tests.lower.scheduling.nests import before_and_after, doubled, summed


def test_loops_over_points_become_one() -> None:
    _, after = before_and_after(doubled(3, 2, 8), FlattenLoops)
    assert (
        str(after)
        == """\
parallel tile < 12:
  i0 = tile / 4
  i1 = tile / 2 % 2
  j_tile = tile % 2
  j = j_tile * 4
  lanes l < 4:
    %0: f32 = load in0[16, 8, 1]
    %2: f32 = mul %0, 2.0
    store out0[16, 8, 1] %2"""
    )


def test_a_loop_over_rows_is_not_merged_with_the_one_within_it() -> None:
    before, after = before_and_after(summed(6, 20), FlattenLoops)
    assert after == before
