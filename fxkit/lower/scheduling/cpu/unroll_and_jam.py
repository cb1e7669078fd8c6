"""Unroll-and-jam: several vectors a loop iteration, which hides the latency of long functions.

Where a loop also writes a byte for each element, gcc handles as many elements at once as a vector
has bytes: four vectors of floats an iteration. With two bytes an element it is two vectors. Four
take 32 registers, and leave short rows to narrower vectors. With the 16 registers of AVX2,
coefficients are loaded again for each vector, and for long functions that still saves up to a
third.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.loop_ir.scalar_functions import named
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    AlongPackedRows,
    AlongRows,
    CpuPass,
    CpuSchedule,
    JammedVectors,
)

# Rows as short as this are not worth it.
SHORT_ROW = 256

# Functions that are worth it, and some whose coefficients leave too few registers for it, unless
# the elements have two bytes.
_STEPPED = named(lambda f: f.unrolls)
_LARGE = named(lambda f: f.coefficients == "many")

# Two polynomials at once leave registers for two vectors.
_IN_TWOS = named(lambda f: f.coefficients == "two")

# With these, or with roundings between the functions, it also pays to put instructions in order
# before registers are given out.
_ORDERED = named(lambda f: f.is_ordered) | {"round"}


@dataclass(frozen=True)
class UnrollAndJam(CpuPass):
    """Let loops that call long functions handle several vectors an iteration.

    for j, a vector of floats: exp  ->  for j, four vectors: exp, exp, exp, exp, interleaved
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with such loops, if the kernel gains from them."""
        kernel, traversal = schedule.kernel, schedule.traversal
        if not isinstance(traversal, AlongRows) or not _gains(kernel):
            return schedule
        called = {i.op for i in kernel.body}
        if isinstance(traversal, AlongPackedRows):
            # Then eight vectors go in step, which also brings more of a row on its way at once;
            # four where coefficients are many.
            is_ordered = bool(called & (_LARGE | _IN_TWOS))
            return replace(schedule, jammed=JammedVectors(4 if is_ordered else 8, is_ordered))
        is_wide = bool(called & _IN_TWOS) and not _is_small(kernel)
        jammed = JammedVectors(2 if is_wide else 4, bool(called & _ORDERED))
        return replace(schedule, jammed=jammed)


def _gains(kernel: Kernel) -> bool:
    """Tell whether the loops over the rows of a kernel handle several vectors in step."""
    length = kernel.sizes[-1]
    if is_runtime(length) or length <= SHORT_ROW:
        return False
    if any(i.is_reduction or i.is_scan for i in kernel.body):
        return False
    if any(i.dtype.itemsize > 4 for i in kernel.body if i.op != "const"):
        return False
    called = {i.op for i in kernel.body}
    return bool(called & _STEPPED) and (_is_small(kernel) or not called & _LARGE)


def _is_small(kernel: Kernel) -> bool:
    return all(b.dtype.itemsize == 2 for b in kernel.buffers)
