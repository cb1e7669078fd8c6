"""Kernels that no pass has chosen another order for are computed row by row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxkit.lower.scheduling.cpu.cpu_schedule import AlongRows, CpuPass, CpuSchedule


@dataclass(frozen=True)
class TraverseAlongRows(CpuPass):
    """Compute one row at a time, where no pass before this one has chosen another order.

    [9] [20], in no order yet  ->  for i < 9: sweeps over j < 20
    """

    is_required: ClassVar[bool] = True

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with an order."""
        return schedule if schedule.traversal else replace(schedule, traversal=AlongRows())
