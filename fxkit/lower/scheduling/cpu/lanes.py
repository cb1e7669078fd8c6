"""Which row sweeps of a schedule are printed with explicit vectors, and how their ends are met."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import AlongPackedRows, AlongRows, CpuSchedule
from fxkit.lower.scheduling.cpu.lane_loops import MOST, gains_in_lanes, stands_in_lanes
from fxkit.lower.scheduling.row_sweeps import RowSweep


@dataclass(frozen=True)
class Lanes:
    """How a loop handles many elements at once; see `lanes.h`.

    Attributes:
        is_even: Whether there are as many elements left whenever it goes on.
    """

    is_even: bool

    @property
    def which(self) -> str:
        """What says to a function which elements there are, as a last argument."""
        return "" if self.is_even else ", on"


def lanes_of(schedule: CpuSchedule, one: RowSweep, *, is_near: bool = False) -> Lanes | None:
    """Return how the loop of a sweep along rows handles many elements at once, if it does.

    Args:
        schedule: The schedule; what is streamed is decided.
        one: The sweep, or a part of one.
        is_near: Whether its loops are for operands near zero.
    """
    kernel = schedule.kernel
    if isinstance(schedule.traversal, AlongPackedRows):
        is_in_lanes = _writes_streamed(schedule, one) or _packed_gains(schedule, one, is_near)
        return even_lanes(schedule, 2 * MOST) if is_in_lanes else None
    common = [p for p in schedule.hoisted.kept if p in one.values]
    if any(kernel.body[p].dtype != torch.float32 for p in common):
        return None
    if len(schedule.stretches_of(one)) != 1:
        return None
    gains = gains_in_lanes(kernel, schedule.plan, one, is_near=is_near)
    if not gains and not (
        _writes_streamed(schedule, one)
        and stands_in_lanes(kernel, schedule.plan, one, is_near=is_near)
    ):
        return None
    return even_lanes(schedule, MOST)


def even_lanes(schedule: CpuSchedule, count: int) -> Lanes:
    """Return lanes that look at the end of a row unless it has a multiple of so many."""
    traversal, length = schedule.traversal, schedule.kernel.row_sizes[-1]
    lengths = [length]
    if isinstance(traversal, AlongRows) and traversal.tile:
        lengths.append(traversal.tile)
    if isinstance(traversal, AlongPackedRows):
        lengths += [stretch.begin for stretch in schedule.stretches]
    return Lanes(not any(is_runtime(one) or one % count for one in lengths))


def _packed_gains(schedule: CpuSchedule, one: RowSweep, is_near: bool) -> bool:
    kernel, plan, kinds = schedule.kernel, schedule.plan, (torch.bfloat16,)
    return all(
        gains_in_lanes(kernel, plan, one, kinds, is_near=is_near, along=stretch)
        for stretch in schedule.stretches_of(one)
    )


def _writes_streamed(schedule: CpuSchedule, one: RowSweep) -> bool:
    """Tell whether a sweep writes results past the caches."""
    return any(schedule.kernel.stores[p].access in schedule.streamed for p in one.stores)
