"""Loop-invariant code motion: costly values that are the same for every row are hoisted.

A batch norm of rows divides by the root of each column's variance: that is computed once, before
the first row. Weights in float16 are converted there too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fxkit.lower.loop_ir.loop_ir import Instruction, Kernel
from fxkit.lower.loop_ir.rounded_values import unrounded
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    AlongFlattenedRows,
    AlongRows,
    CpuPass,
    CpuSchedule,
    HoistedValues,
)
from fxkit.lower.scheduling.cpu.float16_bit_copies import only_moves
from fxkit.lower.scheduling.cpu.tile_rows import TILE
from fxkit.lower.scheduling.kernel_cost import is_costly

# With fewer rows there is little to be spared; longer rows are cut into tiles.
MIN_ROWS = 8
MAX_LENGTH = TILE
MAX_KEPT = 4


@dataclass(frozen=True)
class HoistRowInvariants(CpuPass):
    """Compute what is the same for every row, and costly, before the first one.

    [i] [j]: %5 = div %4, sqrt in1[0, 1]  ->  c4[j] = sqrt in1[j]; then, for each i, %4 / c4[j]
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with such values, but for rows that are only moved, or tiled."""
        traversal = schedule.traversal
        if not isinstance(traversal, AlongRows):
            return schedule
        kernel = schedule.kernel
        if isinstance(traversal, AlongFlattenedRows):
            kernel = traversal.whole
        elif traversal.tile:
            return schedule
        if all(only_moves(schedule.kernel, one) for one in schedule.plan.sweeps):
            return schedule
        return replace(schedule, hoisted=hoisted_values(kernel))


def hoisted_values(kernel: Kernel) -> HoistedValues:
    """Return what the rows of a kernel have in common and is worth computing once.

    Args:
        kernel: A kernel whose row has one axis.
    """
    length, rows = kernel.sizes[-1], math.prod(kernel.outer_sizes)
    if kernel.row_rank != 1 or is_runtime(length) or length > MAX_LENGTH:
        return HoistedValues()
    if not is_runtime(rows) and rows < MIN_ROWS:
        return HoistedValues()
    costly, users = _costly(kernel), _users(kernel)
    kept = tuple(p for p in sorted(costly) if not users[p] <= costly)
    if len(kept) > MAX_KEPT:
        return HoistedValues()
    computed = _needed(kernel, kept)
    hidden: set[int] = set()
    for position in reversed(computed):
        if position not in kept and users[position] <= hidden.union(kept):
            hidden.add(position)
    return HoistedValues(computed, kept, frozenset(hidden))


def _costly(kernel: Kernel) -> set[int]:
    """Return the values that are the same for every row, and are or need a costly one."""
    wide, common, costly = kernel.row_wide, set[int](), set[int]()
    for position, instruction in enumerate(kernel.body):
        operands = instruction.operands
        if instruction.op == "const":
            common.add(position)
        elif _can_be_common(instruction, kernel) and common.issuperset(operands):
            common.add(position)
            takes_long = is_costly(instruction) or _is_converted(instruction, kernel)
            if wide[position] and (takes_long or costly.intersection(operands)):
                costly.add(position)
    return costly


def _is_converted(instruction: Instruction, kernel: Kernel) -> bool:
    """Tell whether a load reads halves, which are converted apart from the loop."""
    if instruction.op != "load":
        return False
    return kernel.buffers[instruction.detail.buffer].dtype == torch.float16


def _can_be_common(instruction: Instruction, kernel: Kernel) -> bool:
    if instruction.is_reduction or instruction.is_scan or instruction.op in ("check", "index"):
        return False
    if instruction.op != "load":
        return True
    return not instruction.operands and not any(instruction.detail.strides[:-1])


def _users(kernel: Kernel) -> list[set[int]]:
    """Return the users of each value; a store is one that no kernel has, of what it writes."""
    users: list[set[int]] = [set() for _ in kernel.body]
    for position, instruction in enumerate(kernel.body):
        for operand in instruction.operands:
            users[operand].add(position)
    for position in range(len(kernel.stores)):
        users[unrounded(kernel, position)].add(-1)
    return users


def _needed(kernel: Kernel, kept: tuple[int, ...]) -> tuple[int, ...]:
    """Return what has to be computed for some values, and these, in order; no constants."""
    needed, open_ = set(kept), list(kept)
    while open_:
        for operand in kernel.body[open_.pop()].operands:
            if operand not in needed:
                needed.add(operand)
                open_.append(operand)
    return tuple(p for p in sorted(needed) if kernel.body[p].op != "const")
