"""How the work of a kernel is divided among blocks and threads, by its sizes and strides."""

from __future__ import annotations

import pytest

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import ThreadMapping
from fxkit.lower.scheduling.gpu.choose_thread_mapping import (
    BLOCK_ROW,
    BUSY,
    THREADS,
    WALKERS,
    WARP_ROW,
    ChooseThreadMapping,
    choose_mapping,
)
from tests.lower.scheduling.nests import before_and_after, centred, doubled, running, summed


def test_points_are_given_out_four_by_four() -> None:
    assert choose_mapping(doubled(3, 40)) == ThreadMapping(4, 1, THREADS)
    assert choose_mapping(doubled(41)).width == 4  # the last tile has fewer
    assert choose_mapping(doubled(3, 41)).width == 1  # rows begin at odd places
    assert choose_mapping(doubled(3, 40), 1).width == 1


@pytest.mark.parametrize(
    ("length", "group", "threads"),
    [(8, 2, THREADS), (64, 16, THREADS), (WARP_ROW, 32, THREADS), (WARP_ROW + 4, 128, 128)],
)
def test_short_rows_are_held_by_part_of_a_warp_or_a_block(
    length: int, group: int, threads: int
) -> None:
    chosen = choose_mapping(centred(9, length))
    assert (chosen.group, chosen.threads) == (group, threads)
    assert chosen.items * chosen.group * chosen.width >= length


def test_long_rows_are_read_by_each_sweep_and_shared_where_there_are_few() -> None:
    few, many = (choose_mapping(centred(rows, BLOCK_ROW + 4)) for rows in (2, BUSY))
    assert (few.items, many.items) == (0, 0)
    assert (few.group, many.group) == (WALKERS, WALKERS)
    assert few.splits > 1 and many.splits == 1
    assert few.splits * few.share >= BLOCK_ROW + 4


def test_columns_have_neighbouring_threads() -> None:
    for kernel in (summed(64, 40, down=True), running(64, 40, down=True)):
        assert choose_mapping(kernel).is_across


def kernels() -> list[Kernel]:
    return [doubled(3, 40), centred(9, 64), centred(4, 33_000), summed(64, 40, down=True)]


@pytest.mark.parametrize("kernel", kernels(), ids=["points", "rows", "long_rows", "columns"])
def test_the_pass_changes_the_mapping_alone(kernel: Kernel) -> None:
    before, after = before_and_after(kernel, ChooseThreadMapping)
    assert before.body == after.body
    assert before.mapping is None
    assert after.mapping == choose_mapping(kernel)
