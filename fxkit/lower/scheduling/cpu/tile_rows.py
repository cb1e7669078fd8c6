"""Long rows without reductions are cut into tiles, which threads share."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        """Return the schedule with tiles; rows that were flattened have theirs."""
        length = schedule.kernel.row_sizes[-1]
        if type(schedule.traversal) is not AlongRows or schedule.kernel.folds_rows:
            return schedule
        if not is_runtime(length) and length <= TILE:
            return schedule
        return replace(schedule, traversal=AlongRows(tile=TILE))
