"""Parts of rows: as long as each other but for some elements, and stretches within a loop."""

from __future__ import annotations

import pytest

from fxkit.lower.codegen.cpp.loop_conditions import LoopConditions
from fxkit.lower.codegen.cpp.row_parts import clipped, row_offset
from fxkit.lower.loop_ir.builder import Builder
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.cpu.cpu_schedule import PARTS
from fxkit.lower.scheduling.cpu.split_rows_across_threads import EVEN, LONG_ROW, part_length
from fxkit.lower.scheduling.index_intervals import IndexInterval


@pytest.mark.parametrize("length", [LONG_ROW, LONG_ROW + 1, 3 * LONG_ROW - 7])
def test_parts_cover_the_row_in_whole_vectors(length: int) -> None:
    size = part_length(length)
    assert size % EVEN == 0
    assert PARTS * (size - EVEN) < length <= PARTS * size


def test_a_stretch_is_clipped_to_a_loop_unless_that_is_the_whole_row() -> None:
    stretch = IndexInterval(3, 8, {})
    assert clipped(stretch, "0", 10, 10) == (3, 8)
    assert clipped(stretch, "begin", "end", 10) == (
        "(begin > 3 ? begin : 3)",
        "(end < 8 ? end : 8)",
    )
    assert clipped(IndexInterval(0, 10, {}), "begin", "end", 10) == ("begin", "end")


def test_buffers_of_a_row_with_several_axes_are_laid_out_by_rows() -> None:
    assert row_offset((7,)) == "j"
    assert row_offset((2, 3, 7)) == "r0 * 21 + r1 * 7 + j"


def test_conditions_are_known_within_a_loop_only() -> None:
    conditions = LoopConditions(Kernel((10,), 0, (), tuple(Builder().body), ()))
    assert conditions.outcome(0) is None
    assert conditions.unless_idle({4, 2}) == [2, 4]
    conditions.settled = {1: False}
    assert conditions.enter(IndexInterval(0, 5, {0: True})) == {0: True, 1: False}
    assert conditions.outcome(1) is False
    conditions.settled = {}
    conditions.leave()
    assert conditions.outcome(1) is None
