"""Points are given out to the threads of a grid."""

from __future__ import annotations

from fxkit.lower.loop_ir.nest_statements import (
    LoopKind,
    loops_of,
)
from fxkit.lower.scheduling.gpu.map_points import MAX_BLOCKS, MapPoints
from fxkit.lower.scheduling.pipelines import scheduled
from tests.lower.scheduling.nests import before_and_after, centred, doubled


def test_each_thread_gets_a_tile_of_points() -> None:
    _, after = before_and_after(doubled(1200), MapPoints)
    assert str(after).splitlines()[:5] == [
        "block block < 3:",
        "  thread thread < 128:",
        "    j_tile = block * 128 + thread",
        "    if j_tile < 300:",
        "      j = j_tile * 4",
    ]


def test_many_points_are_walked_in_steps_of_all_threads() -> None:
    _, after = before_and_after(doubled(2**26), MapPoints)
    assert "for j_tile from block * 128 + thread < 16777216 step 8388608 unroll 1:" in str(after)


def test_a_grid_has_no_more_blocks_than_it_may() -> None:
    nest = scheduled(doubled(2**33))
    (grid,) = loops_of(nest.body, LoopKind.BLOCK)
    assert grid.end == MAX_BLOCKS


def test_rows_are_left_to_another_pass() -> None:
    before, after = before_and_after(centred(3, 8), MapPoints)
    assert after == before
