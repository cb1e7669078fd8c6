"""What a kernel costs: the operations for one point of it, and for all."""

from __future__ import annotations

import math
from dataclasses import replace

from fxkit.lower.loop_ir.loop_ir import Instruction, Kernel
from fxkit.lower.loop_ir.scalar_functions import COSTLY, SCALAR_FUNCTIONS
from fxkit.lower.scheduling.index_intervals import computed, stretches


def cost_of_point(body: tuple[Instruction, ...]) -> int:
    """Estimate the operations for one point of a kernel; a load or an addition is one."""
    return sum([_cost_of(i) for i in body if i.op != "const"])


def cost_of(kernel: Kernel) -> int:
    """Estimate the operations of a kernel; what is the same all along its last axis counts once."""
    row = replace(kernel, row_rank=max(kernel.row_rank, min(1, len(kernel.sizes))))
    wide = row.row_wide
    points, rows = kernel.points, math.prod(row.outer_sizes)
    parts = stretches(kernel)
    total, of_rows = 0, set[int]()
    for stretch in parts:
        found = computed(kernel, stretch)
        along = points if len(parts) == 1 else points // kernel.sizes[-1] * stretch.length
        total += along * sum([_cost_of(kernel.body[p]) for p in found if wide[p]])
        of_rows |= {p for p in found if not wide[p] and kernel.body[p].op != "const"}
    return total + rows * sum([_cost_of(kernel.body[p]) for p in of_rows])


def _cost_of(instruction: Instruction) -> int:
    function = SCALAR_FUNCTIONS.get(instruction.op)
    if function is not None:
        return function.cost
    return getattr(instruction.detail, "cost", 1)  # a tensor op's own


def is_costly(instruction: Instruction) -> bool:
    """Tell whether an operation takes many times as long as an addition."""
    return cost_of_scalar(instruction) >= COSTLY


def cost_of_scalar(instruction: Instruction) -> int:
    """Return the operations of an instruction; what is no scalar function counts as one."""
    function = SCALAR_FUNCTIONS.get(instruction.op)
    return 1 if function is None else function.cost


def calls_function(instruction: Instruction) -> bool:
    """Tell whether an operation takes many instructions, such as an exponential."""
    function = SCALAR_FUNCTIONS.get(instruction.op)
    return function is not None and function.is_call and instruction.dtype.is_floating_point
