"""Rows without reductions are cut into tiles, which threads share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import AlongRows, CpuPass, CpuSchedule

# Elements of a tile.
TILE = 4096


@dataclass(frozen=True)
class TileRows(CpuPass):
    """Cut long rows without reductions into tiles.

    [1] [1000000]: out0[0, 1] = in0[0, 1]  ->  245 tiles of 4096 elements
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with tiles, if rows are long; flattened rows have theirs."""
        traversal = schedule.traversal
        if not isinstance(traversal, AlongRows) or traversal.tile:
            return schedule
        length = schedule.kernel.row_sizes[-1]
        if folds(schedule.kernel) or not (is_runtime(length) or length > TILE):
            return schedule
        return replace(schedule, traversal=replace(traversal, tile=TILE))


def folds(kernel: Kernel) -> bool:
    """Tell whether an element of a row needs others: those of a reduction or a scan do."""
    return any(i.is_reduction or i.is_scan for i in kernel.body)
