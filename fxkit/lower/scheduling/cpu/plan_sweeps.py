"""Row sweeps of kernels that are computed along rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxkit.lower.scheduling.cpu.cpu_schedule import AcrossRows, CpuPass, CpuSchedule
from fxkit.lower.scheduling.row_sweeps import plan_sweeps


@dataclass(frozen=True)
class PlanSweeps(CpuPass):
    """Divide what is computed of a row into sweeps; see `row_sweeps`.

    %1 = reduce_max %0, %2 = sub %0 %1  ->  sweep 0 reduces %1, sweep 1 computes %2
    """

    is_required: ClassVar[bool] = True

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with sweeps; several rows at a time have theirs."""
        if isinstance(schedule.traversal, AcrossRows):
            return schedule
        return replace(schedule, plan=plan_sweeps(schedule.kernel))
