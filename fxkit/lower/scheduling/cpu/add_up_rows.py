"""Kernels that also reduce over all rows: each is added to sums of columns while it is swept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxkit.lower.scheduling.cpu.cpu_schedule import AlongSummedRows, CpuPass, CpuSchedule


@dataclass(frozen=True)
class AddUpRows(CpuPass):
    """Add rows to sums of columns, where a kernel has some.

    [4096] [1024]: sum out1[0, 1] %7  ->  parts of rows with sums of their own, then their sums
    """

    is_required: ClassVar[bool] = True

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with sums, if the kernel has some."""
        if not schedule.kernel.has_sums:
            return schedule
        return replace(schedule, traversal=AlongSummedRows())
