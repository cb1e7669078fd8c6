"""Loop flattening: short contiguous rows become one long row, so that all vector lanes are used.

Along a row of 7 elements most of a vector is idle, and of 31 elements the last 15 are left to the
scalar remainder loop. Where the results of neighbouring rows are contiguous, the rows become one;
an operand that is broadcast along or across rows is expanded first, for the rows of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel, Store
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    AlongFlattenedRows,
    CpuPass,
    CpuSchedule,
)
from fxkit.lower.scheduling.kernel_cost import calls_function

# Longer rows leave little to a last vector that is not full.
LONG = 256

# Elements in a tile, at most.
TILE = 2048

# Lanes of the widest vectors: rows of a multiple of that length need no joining.
LANES = 16


@dataclass(frozen=True)
class FlattenRows(CpuPass):
    """Join short rows whose results are contiguous.

    [1000] [7]: out0[7, 1] = in0[7, 1] + in1[0, 1]  ->  [7000]: out0[1] = in0[1] + spread(in1)
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule of the kernel with long rows, if that is possible and pays."""
        found = None if schedule.traversal else flattened_rows(schedule.kernel)
        if found is None:
            return schedule
        kernel, traversal = found
        return replace(schedule, kernel=kernel, traversal=traversal)


def _tile(length: int) -> int:
    """Return the elements of a tile: whole rows, and whole vectors."""
    rows = TILE // length
    return rows // LANES * LANES * length or rows * length


def flattened_rows(kernel: Kernel) -> tuple[Kernel, AlongFlattenedRows] | None:
    """Return a kernel with its short rows joined, or None where that is not possible or pays not.

    Args:
        kernel: A kernel whose row has one axis.
    """
    if kernel.row_rank != 1 or len(kernel.sizes) < 2:
        return None
    length = kernel.sizes[-1]
    if is_runtime(length) or not 1 < length < LONG or length % LANES == 0:
        return None
    if any(i.is_reduction or i.is_scan or i.op == "index" or _depends(i) for i in kernel.body):
        return None
    if not all(_is_along(store.access, length) for store in kernel.stores):
        return None
    strided = {
        position: i.detail
        for position, i in enumerate(kernel.body)
        if i.op == "load" and not _is_along(i.detail, length) and any(i.detail.strides[-2:])
    }
    is_costly = any(calls_function(i) for i in kernel.body)
    if not strided or not (is_costly or all(is_same_for_all(a) for a in strided.values())):
        return None

    body = tuple(replace(i, detail=_joined(i.detail)) if i.op == "load" else i for i in kernel.body)
    stores = tuple(Store(_joined(s.access), s.value) for s in kernel.stores)
    sizes = (*kernel.sizes[:-2], kernel.sizes[-2] * length)
    long = replace(kernel, sizes=sizes, body=body, stores=stores)
    traversal = AlongFlattenedRows(tile=_tile(length), whole=kernel, length=length, strided=strided)
    return long, traversal


def _depends(instruction: Instruction) -> bool:
    """Tell whether a load is guarded, or its address depends on a value."""
    return instruction.op == "load" and bool(instruction.operands)


def _is_along(access: Access, length: int) -> bool:
    """Tell whether memory is walked in order from each row to the next."""
    outer, inner = access.strides[-2:]
    return inner == 1 and not is_runtime(outer) and outer == length


def is_same_for_all(access: Access) -> bool:
    """Tell whether each row reads the same elements."""
    return not any(access.strides[:-1])


def _joined(access: Access) -> Access:
    """Return an access along a long row; what is strided is walked in order there."""
    *outer, rows, inner = access.strides
    return replace(access, strides=(*outer, 1 if rows or inner else 0))
