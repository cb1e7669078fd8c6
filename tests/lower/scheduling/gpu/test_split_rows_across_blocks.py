"""Blocks share a row, and leave partial results."""

from __future__ import annotations

from fxkit.lower.loop_ir.nest_statements import (
    LoopKind,
    loops_of,
)
from fxkit.lower.scheduling.gpu.split_rows_across_blocks import SplitRowsAcrossBlocks
from tests.lower.scheduling.nests import before_and_after, centred, summed


def test_each_sweep_is_a_launch_and_leaves_what_it_folded() -> None:
    _, after = before_and_after(centred(1, 40_000), SplitRowsAcrossBlocks)
    first, second = loops_of(after.body, LoopKind.BLOCK)
    assert [loop.end for loop in loops_of((first, second), LoopKind.SPLIT)] == [5, 5]
    assert [(p.name, p.splits, p.offset, p.size) for p in after.partials] == [("part1", 5, 0, 32)]
    assert after.scratch_bytes == 32
    text = str(after)
    assert text.index("part1 = a1") < text.index("a1 = max(a1, part1)") < text.index("store")


def test_a_last_launch_folds_what_the_last_sweep_leaves() -> None:
    _, after = before_and_after(summed(1, 40_000), SplitRowsAcrossBlocks)
    launches = loops_of(after.body, LoopKind.BLOCK)
    assert len(launches) == 2
    assert loops_of(launches[1:], LoopKind.SPLIT) == []
    assert after.scratch_bytes == 48


def test_columns_are_shared_too() -> None:
    _, after = before_and_after(summed(64, 2000, down=True), SplitRowsAcrossBlocks)
    assert "lanes" in str(after)
    assert after.partials


def test_many_rows_keep_a_gpu_busy_without() -> None:
    before, after = before_and_after(summed(300, 33_000), SplitRowsAcrossBlocks)
    assert after == before
