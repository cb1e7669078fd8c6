"""The threads of a group take turns along a row."""

from __future__ import annotations

from fxkit.lower.loop_ir.nest_statements import (
    LoopKind,
    loops_of,
)
from fxkit.lower.scheduling.gpu.distribute_rows import DistributeRows
from tests.lower.scheduling.nests import before_and_after, doubled, summed


def test_a_row_that_is_held_is_unrolled_and_folded_over_its_threads() -> None:
    _, after = before_and_after(summed(16, 333), DistributeRows, is_aligned=False)
    assert (
        str(after)
        == """\
block block < 4:
  thread slot < 4:
    thread t < 32:
      i0 = block * 4 + slot
      f64 a1
      a1 = neutral element of add
      unrolled n < 11:
        j = n * 32 + t
        if j < 333:
          %0: f32 = load in0[333, 1]
          a1 = add(a1, %0)
      a1 = add of a1 over t
      %1: f32 = a1
      if t == 0:
        store out0[1, 0] %1"""
    )


def test_a_long_row_is_walked() -> None:
    _, after = before_and_after(summed(300, 33_000), DistributeRows)
    assert "for j_tile from t < 8250 step 512 unroll 4:" in str(after)


def test_the_threads_of_a_column_lie_a_warp_apart() -> None:
    _, after = before_and_after(summed(64, 40, down=True), DistributeRows)
    threads = loops_of(after.body, LoopKind.THREAD)
    assert [(loop.var, loop.end) for loop in threads] == [("t", 8), ("slot", 32)]


def test_a_row_of_one_thread_is_not_folded() -> None:
    _, after = before_and_after(summed(7, 4), DistributeRows)
    assert "over t" not in str(after)
    assert "t == 0" not in str(after)


def test_points_are_left_alone() -> None:
    before, after = before_and_after(doubled(30), DistributeRows)
    assert after == before
