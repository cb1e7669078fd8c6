"""Vectors across rows: kernels whose reduced axis is not the innermost in memory.

A sum over the first of two dimensions is one: its rows are the columns of a matrix. A tile is some
neighbouring rows, one a vector lane; each row scalar is an array with an element for each lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import ceil_div, is_runtime
from fxkit.lower.loop_ir.scalar_functions import COSTLY
from fxkit.lower.scheduling.axis_order import runs_down_columns
from fxkit.lower.scheduling.cpu.cpu_schedule import AcrossRows, CpuPass, CpuSchedule
from fxkit.lower.scheduling.row_sweeps import SweepPlan, plan_sweeps

# Rows in a tile. More of them are read at a stretch, which memory does faster; but a tile that is
# passed more than once is to stay in a cache, and threads share tiles.
ROWS = 64
MORE_ROWS = (256, 128)
ENOUGH_TILES = 8

# What a tile keeps from one sweep to the next stays in the second-level cache. Only functions are
# worth it: what is read has to be passed again anyway.
MAX_TILE_BYTES = 256 * 1024

# Where tiles are fewer, threads share long rows, which are cut as `PARTS` says.
LONG_ROW = 1 << 13


@dataclass(frozen=True)
class VectoriseAcrossRows(CpuPass):
    """Compute several rows at a time, where neighbouring rows are neighbours in memory.

    [512] [100]: %1 = reduce_add in0[1, 512]  ->  64 rows at a time, one a vector lane
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with lanes across rows, where they lie so."""
        kernel = schedule.kernel
        if schedule.traversal or not runs_down_columns(kernel):
            return schedule
        return across_rows(schedule)


def across_rows(schedule: CpuSchedule) -> CpuSchedule:
    """Return the schedule of a kernel whose rows are computed several at a time."""
    kernel, plan = schedule.kernel, sweeps_across(schedule.kernel)
    rows = _rows_of_tile(kernel, plan)
    traversal = AcrossRows(rows, _can_split(kernel, plan, rows))
    return replace(schedule, traversal=traversal, plan=plan)


def sweeps_across(kernel: Kernel) -> SweepPlan:
    """Return the sweeps of a kernel whose rows are computed several at a time."""
    is_known = not any(map(is_runtime, kernel.row_sizes))
    room = MAX_TILE_BYTES // ROWS if is_known else 0
    return plan_sweeps(kernel, room, most_recomputed=COSTLY)


def _rows_of_tile(kernel: Kernel, plan: SweepPlan) -> int:
    """Return how many rows make a tile."""
    rows, outer = kernel.outer_sizes[-1], math.prod(kernel.outer_sizes[:-1])
    if is_runtime(rows) or is_runtime(outer) or len(plan.sweeps) > 1:
        return ROWS
    enough = (n for n in MORE_ROWS if outer * (rows // n) >= ENOUGH_TILES)
    return next(enough, ROWS)


def _can_split(kernel: Kernel, plan: SweepPlan, rows: int) -> bool:
    """Tell whether threads share rows: they are long, and tiles few."""
    count = math.prod(kernel.outer_sizes[:-1]) * ceil_div(kernel.outer_sizes[-1], rows)
    return (
        not is_runtime(count)
        and count < ENOUGH_TILES
        and len(kernel.row_sizes) == 1
        and kernel.row_sizes[0] >= LONG_ROW
        and sum(bool(one.reductions) for one in plan.sweeps) == 1
        and not any(one.stores for one in plan.sweeps)
        and not any(i.is_scan or i.op == "check" for i in kernel.body)
    )
