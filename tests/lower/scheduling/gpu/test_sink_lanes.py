"""Lanes become innermost."""

from __future__ import annotations

from fxkit.lower.scheduling.gpu.sink_lanes import SinkLanes
from tests.lower.scheduling.nests import before_and_after, centred, summed


def test_lanes_move_into_loops_and_accumulators_get_an_element_for_each() -> None:
    before, after = before_and_after(summed(16, 5, down=True), SinkLanes)
    lanes, loop = str(before).index("lanes"), str(before).index("for j")
    assert lanes < loop
    assert (
        str(after)
        == """\
parallel i0_tile < 4:
  i0 = i0_tile * 4
  f64 a1[l]
  lanes l < 4:
    a1 = neutral element of add
  for j < 5:
    lanes l < 4:
      %0: f32 = load in0[1, 16]
      a1 = add(a1, %0)
  lanes l < 4:
    %1: f32 = a1
    store out0[1, 0] %1"""
    )


def test_lanes_along_a_row_are_innermost_already() -> None:
    before, after = before_and_after(centred(3, 8), SinkLanes)
    assert after == before
