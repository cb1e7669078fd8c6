"""Tiled transposition: kernels that read memory across the order in which they write it.

A transposed operand is contiguous along an outer axis. Read in the order of the row, each of its
elements costs a cache line; so a tile of it is transposed first, in vector registers, into a
square staging buffer that is then read in order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Instruction, Kernel
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    CpuPass,
    CpuSchedule,
    InCrossingTiles,
)

# Elements in a tile, and elements of a row in it: the longer its rows, the better the hardware
# foresees what else is read along them, and what is written.
ELEMENTS = 8192
COLUMNS = (64, 128)


@dataclass(frozen=True)
class TileCrossingAxes(CpuPass):
    """Compute a kernel with transposed operands in tiles of the row and the axis that crosses it.

    [512] [512]: out0[512, 1] = in0[1, 512]  ->  tiles of 64 by 128, each transposed first
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with such tiles, if an operand is transposed."""
        kernel = schedule.kernel
        axis = None if schedule.traversal else crossing_axis(kernel)
        if axis is None:
            return schedule
        length = kernel.sizes[-1]
        columns = COLUMNS[is_runtime(length) or length > COLUMNS[0]]
        return replace(schedule, traversal=InCrossingTiles(axis, ELEMENTS // columns, columns))


def crossing_axis(kernel: Kernel) -> int | None:
    """Return the outer axis along which transposed operands lie in memory, or None without any."""
    if kernel.row_rank != 1 or any(i.is_reduction or i.is_scan for i in kernel.body):
        return None
    if any(not store.access.strides[-1] for store in kernel.stores):
        return None
    found = Counter(axis for i in kernel.body if (axis := crossed_by(i)) is not None)
    axis = max(found, key=found.__getitem__) if found else None
    if axis is None:
        return None
    is_short = any(not is_runtime(n) and n < 8 for n in (kernel.sizes[axis], kernel.sizes[-1]))
    return None if is_short else axis


def crossed_by(instruction: Instruction) -> int | None:
    """Return the outer axis along which a load that strides along the row walks memory."""
    if instruction.op != "load" or instruction.operands:
        return None
    *outer, inner = instruction.detail.strides
    return outer.index(1) if abs(inner) > 1 and 1 in outer else None
