"""Parts of a row: those that threads share, and the stretches of a loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxkit.lower.codegen.cpp.kernel_printer import PARTS
from fxkit.lower.codegen.cpp.runtime_parameters import ceil_div
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.index_intervals import IndexInterval
from fxkit.lower.scheduling.row_sweeps import Schedule

# Where there are fewer rows than this, threads share long rows.
FEW_ROWS = 8
LONG_ROW = 1 << 16

# Their parts are as long as each other but for so many elements: four vectors.
EVEN = 64


def is_shared(kernel: Kernel, plan: Schedule) -> bool:
    """Tell whether threads share the rows of a kernel with reductions."""
    return (
        len(kernel.row_sizes) == 1
        and kernel.row_sizes[-1] >= LONG_ROW
        and math.prod(kernel.outer_sizes) < FEW_ROWS
        and not plan.buffers
        and not any(i.is_scan or i.op == "check" for i in kernel.body)
    )


def part_length(length: int) -> int:
    """Return how many elements a part of a shared row has."""
    return ceil_div(length, PARTS * EVEN) * EVEN


def clipped(
    stretch: IndexInterval, begin: str | int, end: str | int, length: int
) -> tuple[str | int, str | int]:
    """Return the bounds of a stretch of a row within those of a loop.

    Args:
        stretch: The stretch.
        begin: Where the loop begins.
        end: Where it ends.
        length: The elements of the row.
    """
    if str(begin) == "0" and str(end) == str(length):
        return stretch.begin, stretch.end
    first, last = stretch.begin, stretch.end
    return (
        f"({begin} > {first} ? {begin} : {first})" if first else begin,
        end if last == length else f"({end} < {last} ? {end} : {last})",
    )


def row_offset(sizes: Sequence[int]) -> str:
    """Return the position within a row of such sizes, as its buffers are laid out."""
    terms = [f"r{axis} * {math.prod(sizes[axis + 1 :])}" for axis in range(len(sizes) - 1)]
    return " + ".join([*terms, "j"])
