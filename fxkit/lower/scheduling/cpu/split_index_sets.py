"""Index-set splitting: rows are cut where guards change."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.scheduling.cpu.cpu_schedule import AlongRows, CpuPass, CpuSchedule
from fxkit.lower.scheduling.index_intervals import stretches


@dataclass(frozen=True)
class SplitIndexSets(CpuPass):
    """Cut rows where the outcome of a guard on the index changes; see `index_intervals`.

    j < 20: load in0 if j < 8 else load in1  ->  j < 8: load in0; 8 <= j < 20: load in1
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with the intervals of a row that vectors go along."""
        if not isinstance(schedule.traversal, AlongRows):
            return schedule
        return replace(schedule, cuts=stretches(schedule.kernel))
