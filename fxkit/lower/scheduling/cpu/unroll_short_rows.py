"""Full unrolling: rows that are short and lie across memory are written out, point by point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import runtime_parameters
from fxkit.lower.scheduling.axis_order import with_an_axis
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuPass, CpuSchedule
from fxkit.lower.scheduling.unrolling import is_short, unrolled


@dataclass(frozen=True)
class GiveRow(CpuPass):
    """Give a kernel that reduces over no axis a row: its innermost axis.

    [9, 20] []: out0[20, 1] = in0[20, 1]  ->  [9] [20]: out0[20, 1] = in0[20, 1]
    """

    is_required: ClassVar[bool] = True

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule of the kernel with a row."""
        return replace(schedule, kernel=_with_row(schedule.kernel))


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
        return replace(schedule, kernel=_with_row(unrolled(kernel)))


def _with_row(kernel: Kernel) -> Kernel:
    return kernel if kernel.row_rank else replace(with_an_axis(kernel), row_rank=1)
