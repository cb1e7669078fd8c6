"""Non-temporal (streaming) stores: large results bypass the caches.

A cache line that is written in part is read from memory first. Where a loop fills whole lines,
that read is a third of the traffic, for nothing; and what is larger than the caches is evicted
before anyone reads it. So the loop writes to a staging buffer of a few lines, which stays in the L1
cache, and non-temporal stores copy whole lines from there to memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from fxkit.lower.loop_ir.loop_ir import Access, Kernel, Store
from fxkit.lower.loop_ir.runtime_parameters import runtime_parameters
from fxkit.lower.loop_ir.scalar_functions import named
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    AlongPackedRows,
    AlongRows,
    CpuPass,
    CpuSchedule,
    InCrossingTiles,
)
from fxkit.lower.scheduling.cpu.lane_loops import MOST, gains_in_lanes, stands_in_lanes
from fxkit.lower.scheduling.cpu.lanes import even_lanes
from fxkit.lower.scheduling.cpu.prefetch_rows import CACHED_BYTES, short_rows
from fxkit.lower.scheduling.kernel_cost import calls_function
from fxkit.lower.scheduling.row_sweeps import RowSweep, SweepPlan

# Results of fewer bytes stay in a cache for those who read them next.
LEAST_BYTES = 1 << 22

# One of these for an element is done while memory is waited for.
_BRIEF = named(lambda f: f.is_brief)

# Elements that a staging buffer holds.
STAGED_ELEMENTS = 256

LINE_BYTES = 64


@dataclass(frozen=True)
class StreamStores(CpuPass):
    """Write large results past the caches, where loops fill whole lines and wait for memory.

    store out0[j]  ->  store to a buffer of a few lines; non-temporal stores from there
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with what is written so."""
        kernel, plan, traversal = schedule.kernel, schedule.plan, schedule.traversal
        if isinstance(traversal, InCrossingTiles):
            return replace(schedule, streamed=streamed_accesses(kernel, plan))
        if isinstance(traversal, AlongPackedRows):
            return replace(schedule, streamed=_packed_streams(schedule), streams_in_lanes=True)
        if not isinstance(traversal, AlongRows) or traversal.is_split:
            return schedule
        everywhere = streamed_accesses(kernel, plan)
        streamed = streamed_accesses(kernel, plan, in_lanes=True)
        return replace(schedule, streamed=streamed, streams_in_lanes=streamed != everywhere)


def _packed_streams(schedule: CpuSchedule) -> frozenset[Access]:
    """Return what leaves past the caches in lanes, by sweeps that call no functions.

    Else two elements take longer to compute than to write.
    """
    if not even_lanes(schedule, 2 * MOST).is_even:
        return frozenset()
    kernel, plan = schedule.kernel, schedule.plan
    brief = (one for one in plan.sweeps if _is_brief_in_lanes(schedule, one))
    written = {kernel.stores[p].access for one in brief for p in one.stores}
    return streamed_accesses(kernel, plan) & written


def _is_brief_in_lanes(schedule: CpuSchedule, one: RowSweep) -> bool:
    kernel, kinds = schedule.kernel, (torch.bfloat16,)
    is_brief = not any(calls_function(kernel.body[p]) for p in one.values)
    return is_brief and all(
        stands_in_lanes(kernel, schedule.plan, one, kinds, along=stretch)
        for stretch in schedule.stretches_of(one)
    )


def streamed_accesses(
    kernel: Kernel, plan: SweepPlan, *, in_lanes: bool = False
) -> frozenset[Access]:
    """Return how large results of a kernel are written that leave past the caches.

    Their rows are whole lines, and the sweep that writes them waits for memory.

    Args:
        kernel: The kernel.
        plan: Its sweeps.
        in_lanes: Whether a sweep may wait that is printed in lanes, and computes less then.
    """
    if runtime_parameters(kernel) or not kernel.points:
        return frozenset()
    waiting = [
        one
        for one in plan.sweeps
        if not _is_busy(kernel, one) or (in_lanes and gains_in_lanes(kernel, plan, one))
    ]
    stores = [kernel.stores[p] for one in waiting for p in one.stores]
    found = frozenset(store.access for store in stores if _fills_lines(kernel, store))
    return found if streamed_bytes(kernel, found) >= LEAST_BYTES else frozenset()


def streamed_bytes(kernel: Kernel, accesses: Iterable[Access]) -> int:
    """Return the bytes of all that is written."""
    return kernel.points * sum(element_bytes(kernel, access) for access in accesses)


def copied_bytes(kernel: Kernel, accesses: Iterable[Access]) -> int:
    """Return how large a copy leaves as much in the caches as a kernel does, or writes as much.

    Args:
        kernel: The kernel.
        accesses: What is written past the caches.
    """
    loads = [i.detail for i in kernel.body if i.op == "load"]
    moved = {
        (it.buffer, it.strides, it.scales): it
        for it in [*loads, *(store.access for store in kernel.stores)]
    }
    both = sum(_touched(kernel, it) * element_bytes(kernel, it) for it in moved.values())
    return max(streamed_bytes(kernel, accesses), both // 2)


def _touched(kernel: Kernel, access: Access) -> int:
    sizes = zip(kernel.sizes, access.strides, strict=True)
    return kernel.points if access.scales else math.prod(size for size, stride in sizes if stride)


def _is_busy(kernel: Kernel, one: RowSweep) -> bool:
    """Tell whether a sweep computes so much for an element that plain stores are done meanwhile."""
    called = [kernel.body[p] for p in one.values if calls_function(kernel.body[p])]
    long = [i for i in called if i.op not in _BRIEF or i.dtype != torch.float32]
    return bool(long) or len(called) > 1


def _fills_lines(kernel: Kernel, store: Store) -> bool:
    """Tell whether each row of a result lies along memory, and begins with a line."""
    access = store.access
    *outer, step = access.strides
    line = LINE_BYTES // element_bytes(kernel, access)
    steps = [stride for stride, size in zip(outer, kernel.sizes, strict=False) if size > 1]
    return (
        step == 1
        and not store.is_sum
        and not access.scales
        and access.offset % line == 0
        and all(stride and stride % line == 0 for stride in steps)
        and (kernel.sizes[-1] >= STAGED_ELEMENTS or _is_foreseen(kernel, tuple(outer)))
    )


def _is_foreseen(kernel: Kernel, outer: tuple[int, ...]) -> bool:
    """Tell whether rows are read in the order in which they are written, are asked for, or few.

    Short rows that lie apart are not foreseen: many of them have to be on their way at once, and
    stores that wait for whole lines leave room for few.
    """
    asked = short_rows(kernel)
    loads = [i.detail for i in kernel.body if i.op == "load"]
    return all(
        it.strides[:-1] == outer
        or it in asked
        or _touched(kernel, it) * element_bytes(kernel, it) < CACHED_BYTES
        for it in loads
    )


def element_bytes(kernel: Kernel, access: Access) -> int:
    """Return the bytes of what is read or written at a time."""
    return kernel.buffers[access.buffer].dtype.itemsize
