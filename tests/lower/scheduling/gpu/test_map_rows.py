"""Rows are given out to blocks."""

from __future__ import annotations

from fxkit.lower.scheduling.gpu.map_rows import MapRows
from tests.lower.scheduling.nests import before_and_after, centred, doubled, summed


def test_threads_without_a_row_compute_the_last_one_and_store_nothing() -> None:
    _, after = before_and_after(summed(9, 20), MapRows)
    assert str(after).splitlines()[:5] == [
        "block block < 1:",
        "  thread slot < 16:",
        "    asked = block * 16 + slot",
        "    is_inside = asked < 9",
        "    i0 = asked < 8 ? asked : 8",
    ]
    assert str(after).splitlines()[-2:] == ["    if is_inside:", "      store out0[1, 0] %1"]


def test_a_row_of_a_whole_block_is_always_there() -> None:
    _, after = before_and_after(centred(3, 1500), MapRows)
    assert str(after).startswith("block block < 3:\n  i0 = block\n")
    assert "is_inside" not in str(after)


def test_points_are_left_alone() -> None:
    before, after = before_and_after(doubled(30), MapRows)
    assert after == before
