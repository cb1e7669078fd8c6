"""Short or sequential rows as transposed tiles: vectorised across neighbouring rows.

A maximum of 5 neighbours, or a softmax of 10, leaves most of a vector along the row idle or waiting
for its own lanes; and each element of a cumulative sum waits for the last one. So a tile of rows is
transposed into a staging buffer first. Each step along the row is then one of full vectors, and a
result along the row is transposed back. Of long rows, some columns are transposed at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    AcrossTransposedRows,
    CpuPass,
    CpuSchedule,
)
from fxkit.lower.scheduling.cpu.vectorise_across_rows import ROWS, sweeps_across
from fxkit.lower.scheduling.kernel_cost import calls_function
from fxkit.lower.scheduling.row_sweeps import MANY_ROWS, plan_sweeps

# Longer rows have enough full vectors of their own; and those that are passed more than once, where
# no vector is left half empty, as their tiles take more of a cache.
LONG_ROW = 256
LONG_PASSED_ROW = 64
LANES_OF_VECTOR = 16
MAX_TILE_BYTES = 1 << 16

# Extrema of shorter rows are found across them; longer ones have full vectors of their own, or
# many, unless a function takes most of the time.
LONG_FULL_ROW = 32
LONG_UNEVEN_ROW = 128

# How long rows are whose sums and products are faster across them, by the bytes of an element: the
# compiler writes shorter ones out, and longer ones have vectors enough.
SUMMED = {1: range(2, 64), 2: range(2, 64), 4: range(5, 32), 8: range(5, 16)}

# Cumulative sums of float32 wait less for their elements than they take to be turned over, where
# shorter rows come from memory; those of float64, which are turned over half as fast, anywhere.
LONG_SUMMED_ROW = 512
CACHED_BYTES = 1 << 21

# Columns of a long row that are turned over at a time, and of how many rows: with more rows, whose
# neighbours lie far apart, memory takes several times as long.
LONG_SCANNED_ROW = 64
COLUMNS = 64
ROWS_IF_LONG = 16


@dataclass(frozen=True)
class TransposeRows(CpuPass):
    """Compute short or sequential rows that lie along memory across them, transposed first.

    [10000] [5]: %1 = reduce_max in0[5, 1]  ->  64 rows at a time, one a vector lane
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with transposed rows, where vectors along them would be slower."""
        kernel = schedule.kernel
        if schedule.traversal or not is_transposed(kernel):
            return schedule
        length = kernel.sizes[-1]
        is_long = is_runtime(length) or length >= (
            LONG_SCANNED_ROW if kernel.has_scans else LONG_ROW
        )
        rows, columns = (ROWS_IF_LONG, COLUMNS) if is_long else (ROWS, 0)
        traversal = AcrossTransposedRows(rows, columns=columns)
        return replace(schedule, traversal=traversal, plan=sweeps_across(kernel))


def is_transposed(kernel: Kernel) -> bool:
    """Tell whether a kernel goes along rows that lie along memory, and is faster across them."""
    if kernel.row_rank != 1 or len(kernel.sizes) < 2:
        return False
    loads = [i for i in kernel.body if i.op == "load" and i.detail.strides[-1]]
    read = [i.detail for i in loads]
    written = [store.access for store in kernel.stores if store.access.strides[-1]]
    return (
        _has_rows(kernel)
        and any(map(lies_along, read))
        and all(lies_along(access) or not access.strides[-2] for access in read)
        and all(map(lies_along, written))
        and not any(i.operands for i in loads)
        and _pays(kernel, {*read, *written})
    )


def _has_rows(kernel: Kernel) -> bool:
    """Tell whether there are rows enough, each of which waits for its own elements."""
    rows, length = kernel.sizes[-2:]
    if kernel.has_scans:
        return not is_runtime(rows) and rows >= MANY_ROWS
    is_short = not is_runtime(length) and 1 < length < LONG_ROW
    is_enough = is_runtime(rows) or rows >= MANY_ROWS
    return is_short and is_enough and kernel.has_reductions


def lies_along(access: Access) -> bool:
    """Tell whether neighbours in a row are neighbours in memory, and each row is another."""
    *_, apart, step = access.strides
    is_next = not is_runtime(step) and abs(step) == 1
    return is_next and not access.scales and not is_runtime(apart) and apart > 0


def _pays(kernel: Kernel, accesses: set[Access]) -> bool:
    """Tell whether vectors along the rows would be slower."""
    length = kernel.sizes[-1]
    sizes = [kernel.buffers[a.buffer].dtype.itemsize for a in accesses if lies_along(a)]
    scans = [i for i in kernel.body if i.is_scan]
    if scans:
        return _scan_pays(kernel, scans, max(sizes))
    if sum(sizes) * length * ROWS > MAX_TILE_BYTES:
        return False
    is_full = length % LANES_OF_VECTOR == 0
    if len(plan_sweeps(kernel, buffer_bytes=0).sweeps) > 1:
        return length < LONG_PASSED_ROW or not is_full
    if all(i.op in _SUMS for i in kernel.body if i.is_reduction):
        return length in SUMMED[min(8, max(sizes))] and not is_full
    if is_full:
        return length < LONG_FULL_ROW
    return length < LONG_UNEVEN_ROW or any(calls_function(i) for i in kernel.body)


def _scan_pays(kernel: Kernel, scans: list[Instruction], itemsize: int) -> bool:
    """Tell whether rows with cumulative operations wait for their elements longer than to turn."""
    if any(i.dtype.is_floating_point and i.op not in _SUMS for i in scans):
        return True
    if itemsize >= 8 or not any(i.dtype.is_floating_point or i.op not in _SUMS for i in scans):
        return False
    length, points = kernel.sizes[-1], kernel.points
    is_small = itemsize < 4 or is_runtime(points) or points * itemsize <= CACHED_BYTES
    return is_small or is_runtime(length) or length >= LONG_SUMMED_ROW


_SUMS = frozenset({"reduce_add", "reduce_mul", "scan_add", "scan_mul"})
