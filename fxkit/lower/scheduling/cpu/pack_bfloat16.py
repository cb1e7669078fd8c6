"""bfloat16 rows as packed pairs: two elements in each 32-bit word.

The upper element is a float32 once the lower half is cleared, the lower one once it is shifted up:
one instruction each, where a vector of 16-bit elements has to be widened first, and narrowed again
before it is stored. So each operation of a loop is printed twice, for the lower and for the upper
elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    AlongPackedRows,
    AlongRows,
    CpuPass,
    CpuSchedule,
)
from fxkit.lower.scheduling.cpu.hoist_row_invariants import hoisted_values
from fxkit.lower.scheduling.cpu.lane_loops import unguarded
from fxkit.lower.scheduling.index_intervals import IndexInterval, computed
from fxkit.lower.scheduling.row_sweeps import MAX_BUFFER_BYTES

# Rows shorter than this are worth it where they fill whole vectors of words.
LONG = 256
LANES = 16

# Room on the stack for rows that lie between words.
MAX_SPARE_BYTES = 2 * MAX_BUFFER_BYTES

_REDUCTIONS = frozenset({"reduce_add", "reduce_max", "reduce_min"})


@dataclass(frozen=True)
class PackBfloat16(CpuPass):
    """Walk rows of bfloat16 two elements at a time, which are a word.

    for j < 1024: %1 = mul load in0[j], 2  ->  for j < 512: low and high of the word in0[j]
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with packed rows, if all that varies along them is bfloat16."""
        traversal = schedule.traversal
        if type(traversal) is not AlongRows:
            return schedule
        if not is_packed_bfloat16(schedule.kernel, schedule.stretches, traversal.tile):
            return schedule
        return replace(schedule, traversal=AlongPackedRows(traversal.tile))


def is_packed_bfloat16(kernel: Kernel, parts: Sequence[IndexInterval], tile: int) -> bool:
    """Tell whether the rows of a kernel can be walked two elements at a time.

    Args:
        kernel: A kernel whose row is its innermost axis.
        parts: The stretches of its rows.
        tile: Elements of the tiles that they are cut into; 0 where they are not.
    """
    if kernel.row_rank != 1:
        return False
    length, wide = kernel.sizes[-1], kernel.row_wide
    if not tile and (is_runtime(length) or length % (2 if length >= LONG else 2 * LANES)):
        return False
    accesses = paired_accesses(kernel)
    room = (tile or length) * torch.bfloat16.itemsize
    if len(parts) > 1 and (tile or not _are_even(kernel, parts)):
        return False
    return (
        any(i.op == "load" and is_wide for i, is_wide in zip(kernel.body, wide, strict=True))
        and all(_all_stand(kernel, part, wide) for part in parts)
        and all(_is_along(kernel, access) for access in accesses)
        and all(
            not any(s.access.strides[-1:]) or kernel.body[s.value].dtype == torch.float32
            for s in kernel.stores
        )
        and room * len(set(accesses)) <= MAX_SPARE_BYTES
        and not hoisted_values(kernel)
    )


def _are_even(kernel: Kernel, parts: Sequence[IndexInterval]) -> bool:
    """Tell whether stretches of a row, and what is read along them, consist of whole words."""
    spans = spans_of(kernel, parts)
    return all(part.begin % 2 == 0 for part in parts) and all(
        type(access.offset) is int and (access.offset - spans[row_of(access)][0]) % 2 == 0
        for access in paired_accesses(kernel)
        if row_of(access) in spans
    )


def row_of(access: Access) -> tuple[int, tuple[int, ...]]:
    """Return what the accesses of the same row of memory have in common."""
    return access.buffer, access.strides


def spans_of(
    kernel: Kernel, parts: Sequence[IndexInterval]
) -> dict[tuple[int, tuple[int, ...]], tuple[int, int]]:
    """Return, for each row of memory, where what is accessed of it begins and ends.

    Args:
        kernel: The kernel.
        parts: The stretches of its rows.
    """
    spans: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}

    def widen(access: Access, part: IndexInterval) -> None:
        first, last = access.offset + part.begin, access.offset + part.end
        low, high = spans.get(row_of(access), (first, last))
        spans[row_of(access)] = min(low, first), max(high, last)

    for part in parts:
        for position in computed(kernel, part):
            if kernel.body[position].op == "load":
                widen(kernel.body[position].detail, part)
        for store in kernel.stores:
            widen(store.access, part)
    return spans


def _all_stand(kernel: Kernel, part: IndexInterval, wide: Sequence[bool]) -> bool:
    """Tell whether all that is computed along a stretch is printed twice, or need not be."""
    found = computed(kernel, part)
    return not [p for p in found if not _can_stand(unguarded(kernel, part, p), wide[p])]


def _can_stand(instruction: Instruction, is_wide: bool) -> bool:
    """Tell whether an instruction is one of those that are printed twice, or need not be."""
    if instruction.is_scan or instruction.op in ("check", "index"):
        return False
    if instruction.is_reduction:
        return instruction.op in _REDUCTIONS and instruction.dtype == torch.float32
    if not is_wide:
        return True
    if instruction.op == "load":
        return not instruction.operands
    return instruction.dtype in (torch.float32, torch.bool)


def paired_accesses(kernel: Kernel) -> list[Access]:
    """Return how memory is accessed that varies along the row."""
    loads = [i.detail for i in kernel.body if i.op == "load"]
    accesses = [*loads, *(store.access for store in kernel.stores)]
    return [access for access in accesses if any(access.strides[-1:])]


def _is_along(kernel: Kernel, access: Access) -> bool:
    """Tell whether an access walks elements of bfloat16 in the order in which they lie."""
    return access.strides[-1] == 1 and kernel.buffers[access.buffer].dtype == torch.bfloat16
