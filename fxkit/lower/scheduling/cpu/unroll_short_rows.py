"""Full unrolling: rows that are short and lie across memory are written out, point by point."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import runtime_parameters
from fxkit.lower.scheduling.axis_order import with_an_axis
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuPass, CpuSchedule
from fxkit.lower.scheduling.unrolling import is_short, unrolled


@dataclass(frozen=True)
class UnrollShortRows(CpuPass):
    """Give a kernel a row, and unroll one that is short and lies across memory.

        [9] [3]: %1 = reduce_add in0[1, 9]  ->  [9]: %3 = in0[1] + in0[1] at 9 + in0[1] at 18

    Kernels that add rows up keep theirs.
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule of the kernel without a short row."""
        kernel = schedule.kernel
        if kernel.has_sums:
            return schedule
        kernel = _with_row(kernel)
        if not runtime_parameters(kernel) and is_short(kernel):
            kernel = _with_row(unrolled(kernel))
        return replace(schedule, kernel=kernel)


def _with_row(kernel: Kernel) -> Kernel:
    """Make the innermost axis of a kernel without reductions its row."""
    return kernel if kernel.row_rank else replace(with_an_axis(kernel), row_rank=1)
