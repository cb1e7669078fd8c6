"""Long rows with reductions, where there are few, are cut into parts that threads share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import ceil_div
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    PARTS,
    AlongRows,
    AlongSummedRows,
    CpuPass,
    CpuSchedule,
)
from fxkit.lower.scheduling.row_sweeps import SweepPlan

# Where there are fewer rows than this, threads share long rows.
FEW_ROWS = 8
LONG_ROW = 1 << 16

# Their parts are as long as each other but for so many elements: four vectors.
EVEN = 64


@dataclass(frozen=True)
class SplitRowsAcrossThreads(CpuPass):
    """Let threads share each row, in parts whose results are folded in order.

    [1] [1000000]: %1 = reduce_add in0[0, 1]  ->  32 sums of parts, then their sum
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with rows in parts, if they are long and few."""
        traversal = schedule.traversal
        if not isinstance(traversal, AlongRows) or isinstance(traversal, AlongSummedRows):
            return schedule
        if not schedule.kernel.folds_rows or not _is_shared(schedule.kernel, schedule.plan):
            return schedule
        return replace(schedule, traversal=replace(traversal, is_split=True))


def _is_shared(kernel: Kernel, plan: SweepPlan) -> bool:
    return (
        len(kernel.row_sizes) == 1
        and kernel.row_sizes[-1] >= LONG_ROW
        and math.prod(kernel.outer_sizes) < FEW_ROWS
        and not plan.buffers
        and not any(i.is_scan or i.op == "check" for i in kernel.body)
    )


def part_length(length: int) -> int:
    """Return how many elements a part of a shared row has."""
    return ceil_div(length, PARTS * EVEN) * EVEN
