"""Loop-invariant code motion: costly values that are the same for every row are hoisted.

A batch norm of rows divides by the root of each column's variance: that is computed once, before
the first row. Weights in float16 are converted there too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fxkit.lower.codegen.cpp.runtime_parameters import is_runtime
from fxkit.lower.loop_ir.loop_ir import Instruction, Kernel
from fxkit.lower.loop_ir.rounded_values import unrounded
from fxkit.lower.scheduling.kernel_cost import is_costly

# With fewer rows there is little to be spared; longer rows are cut into tiles.
MIN_ROWS = 8
MAX_LENGTH = 4096
MAX_KEPT = 4


@dataclass(frozen=True)
class CommonValues:
    """What is computed before the first row, by its positions in the body of a kernel.

    Attributes:
        computed: All that is, in order.
        kept: What the rows read.
        hidden: What was needed for nothing else, and is not computed in a row.
    """

    computed: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    hidden: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self.kept)


def common_values(kernel: Kernel) -> CommonValues:
    """Return what the rows of a kernel have in common and is worth computing once.

    Args:
        kernel: A kernel whose row has one axis.
    """
    length, rows = kernel.sizes[-1], math.prod(kernel.outer_sizes)
    if kernel.row_rank != 1 or is_runtime(length) or length > MAX_LENGTH:
        return CommonValues()
    if not is_runtime(rows) and rows < MIN_ROWS:
        return CommonValues()
    costly, users = _costly(kernel), _users(kernel)
    kept = tuple(p for p in sorted(costly) if not users[p] <= costly)
    if len(kept) > MAX_KEPT:
        return CommonValues()
    computed = _needed(kernel, kept)
    hidden: set[int] = set()
    for position in reversed(computed):
        if position not in kept and users[position] <= hidden.union(kept):
            hidden.add(position)
    return CommonValues(computed, kept, frozenset(hidden))


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
