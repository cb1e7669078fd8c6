"""Full unrolling: rows that are short and lie across memory are written out, point by point."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.runtime_parameters import runtime_parameters
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuPass, CpuSchedule
from fxkit.lower.scheduling.cpu.give_row import innermost_as_row
from fxkit.lower.scheduling.unrolling import is_short, unrolled


@dataclass(frozen=True)
class UnrollShortRows(CpuPass):
    """Write out the points of rows that are short and lie across memory.

    [9] [3]: %1 = reduce_add in0[1, 9]  ->  [9]: %3 = in0[1] + in0[1] at 9 + in0[1] at 18
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule of the kernel without a short row."""
        kernel = schedule.kernel
        if kernel.has_sums or runtime_parameters(kernel) or not is_short(kernel):
            return schedule
        return replace(schedule, kernel=innermost_as_row(unrolled(kernel)))
