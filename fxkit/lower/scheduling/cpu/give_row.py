"""Kernels that reduce over no axis get a row, which loops go along."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.axis_order import with_an_axis
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuPass, CpuSchedule


@dataclass(frozen=True)
class GiveRow(CpuPass):
    """Give a kernel that reduces over no axis a row: its innermost axis.

    [9, 20] []: out0[20, 1] = in0[20, 1]  ->  [9] [20]: out0[20, 1] = in0[20, 1]
    """

    is_required: ClassVar[bool] = True

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule of the kernel with a row."""
        return replace(schedule, kernel=innermost_as_row(schedule.kernel))


def innermost_as_row(kernel: Kernel) -> Kernel:
    """Return a kernel whose innermost axis is its row, if it has none."""
    return kernel if kernel.row_rank else replace(with_an_axis(kernel), row_rank=1)
