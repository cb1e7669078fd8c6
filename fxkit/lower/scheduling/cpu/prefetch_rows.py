"""Software prefetch: rows at a distance, and cache lines that the hardware does not foresee."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Access, Kernel
from fxkit.lower.loop_ir.runtime_parameters import ceil_div, is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import AlongRows, CpuPass, CpuSchedule
from fxkit.lower.scheduling.kernel_cost import calls_function
from fxkit.lower.scheduling.row_sweeps import SweepPlan

# The processor foresees the lines of a long row, but not those of the rows that follow a short one.
# They are asked for so many bytes ahead, where they fit no cache. Where they lie apart, that is so
# many rows along an axis that is at least eight times as long.
AHEAD = 4096
SHORT_BYTES = 1024
CACHED_BYTES = 1 << 21
LONG_AXIS = 8

# Where a row is gone through several times, memory is idle after the first. So the last sweep asks
# for the next row, part by part, as long as it fits into the nearest cache beside this one. It does
# not where the first sweep computes so much that lines arrive meanwhile.
ASKED = 256
NEXT_BYTES = 1 << 14


@dataclass(frozen=True)
class PrefetchRows(CpuPass):
    """Ask for memory ahead where the processor foresees no lines: short rows, and the next row.

    for j: load in0[j]  ->  prefetch in0 + 1024 elements; for j: load in0[j]
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with what is asked for."""
        traversal, kernel = schedule.traversal, schedule.kernel
        if not isinstance(traversal, AlongRows):
            return schedule
        prefetched = {} if traversal.tile else short_rows(kernel)
        is_plain = not (traversal.is_split or schedule.jammed or schedule.has_halves)
        ahead = next_rows(kernel, schedule.plan) if is_plain else []
        if ahead and len(schedule.stretches_of(schedule.plan.sweeps[-1])) != 1:
            ahead = []
        return replace(schedule, prefetched=prefetched, next_rows=tuple(ahead))


def short_rows(kernel: Kernel) -> dict[Access, int]:
    """Return one access for each pointer to short rows, if those that follow are asked for.

    With each comes how many elements ahead a row is asked for.
    """
    if kernel.folds_rows:
        return {}
    length = kernel.row_sizes[-1]
    short = {
        access: AHEAD // kernel.buffers[access.buffer].dtype.itemsize
        for access in _rows_behind_each_other(kernel)
        if length * kernel.buffers[access.buffer].dtype.itemsize <= SHORT_BYTES
    }
    short |= {access: ahead for access, ahead in _rows_apart(kernel).items() if access not in short}
    return short if _has_inputs(kernel, short) else {}


def _rows_apart(kernel: Kernel) -> dict[Access, int]:
    """Return one access for each pointer to short rows that lie apart, and fit no cache.

    With each comes how far it is to a row that is read as many rows later as are asked for.
    """
    if is_runtime(kernel.row_sizes[-1]) or not _has_known_sizes(kernel) or kernel.row_rank != 1:
        return {}
    found: dict[tuple[int, tuple[int, ...], int], tuple[Access, int]] = {}
    for instruction in kernel.body:
        if instruction.op != "load" or instruction.operands:
            continue
        access = instruction.detail
        size = kernel.buffers[access.buffer].dtype.itemsize
        row = kernel.row_sizes[-1] * size
        is_apart = access.strides[-1] == 1 and all(access.strides) and row <= SHORT_BYTES
        if is_apart and math.prod(kernel.sizes) * size >= CACHED_BYTES:
            ahead = _row_later(kernel.outer_sizes, access.strides, ceil_div(AHEAD, row))
            if ahead:
                found.setdefault(
                    (access.buffer, access.strides[:-1], access.offset), (access, ahead)
                )
    return dict(found.values())


def _row_later(sizes: tuple[int, ...], strides: tuple[int, ...], rows: int) -> int:
    """Return how far it is to what is read about so many rows later; 0 where that is no one step.

    A step along an axis is taken where the axis is long, so that few steps lead beyond it.
    """
    below = 1
    for size, stride in zip(reversed(sizes), reversed(strides[: len(sizes)]), strict=True):
        steps = ceil_div(rows, below)
        if size >= LONG_AXIS * steps:
            return steps * stride
        below *= size
        if below > 4 * rows:
            return 0
    return 0


def next_rows(kernel: Kernel, plan: SweepPlan) -> list[Access]:
    """Return one access for each pointer whose next row the last sweep asks for.

    Args:
        kernel: The kernel.
        plan: Its sweeps.
    """
    sweeps, length = plan.sweeps, kernel.row_sizes[-1]
    if len(sweeps) < 2 or sweeps[-1].reductions:
        return []
    if is_runtime(length) or length < ASKED:
        return []
    if any(calls_function(kernel.body[p]) for p in sweeps[0].values):
        return []
    found = _rows_behind_each_other(kernel)
    sizes = [kernel.buffers[access.buffer].dtype.itemsize for access in found]
    is_near = length * sum(sizes) <= NEXT_BYTES
    return found if is_near and _has_inputs(kernel, found) else []


def _has_known_sizes(kernel: Kernel) -> bool:
    return all(type(size) is int for size in kernel.sizes)


def _has_inputs(kernel: Kernel, accesses: Iterable[Access]) -> bool:
    return any(not kernel.buffers[access.buffer].is_output for access in accesses)


def _rows_behind_each_other(kernel: Kernel) -> list[Access]:
    """Return one access for each pointer to rows that follow each other, and fit no cache."""
    if not kernel.outer_sizes or len(kernel.outer_sizes) + 1 != len(kernel.sizes):
        return []
    if not _has_known_sizes(kernel):
        return []
    length = kernel.row_sizes[-1]
    loads = [i.detail for i in kernel.body if i.op == "load" and not i.detail.scales]
    found: dict[tuple[int, tuple[int, ...], int], Access] = {}
    for access in [*loads, *(store.access for store in kernel.stores)]:
        size = kernel.buffers[access.buffer].dtype.itemsize
        is_dense = access.strides[-2:] == (length, 1) and all(access.strides)
        if is_dense and math.prod(kernel.sizes) * size >= CACHED_BYTES:
            found.setdefault((access.buffer, access.strides[:-1], access.offset), access)
    return list(found.values())
