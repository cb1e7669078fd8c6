"""Unroll-and-jam: several vectors a loop iteration, which hides the latency of long functions.

Where a loop also writes a byte for each element, gcc handles as many elements at once as a vector
has bytes: four vectors of floats an iteration. With two bytes an element it is two vectors. Four
take 32 registers, and leave short rows to narrower vectors. With the 16 registers of AVX2,
coefficients are loaded again for each vector, and for long functions that still saves up to a
third.
"""

from __future__ import annotations

from fxkit.lower.codegen.cpp.runtime_parameters import is_runtime
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.scalar_functions import named

IN_STEP = """\
#ifdef __AVX2__
#define FX_STEPS(type, count) type steps[count]
#define FX_STEP(place) steps[place] = 1
#define FX_STEPPED() asm volatile("" : : "r"(steps) : "memory")
#ifdef __clang__
#define FX_SCHEDULED
#else
#define FX_SCHEDULED __attribute__((optimize("schedule-insns", "sched-pressure")))
#endif
#else
#define FX_SCHEDULED
#define FX_STEPS(type, count)
#define FX_STEP(place)
#define FX_STEPPED()
#endif
"""

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


def is_stepped(kernel: Kernel) -> bool:
    """Tell whether the loops over the rows of a kernel handle several vectors in step."""
    length = kernel.sizes[-1]
    if is_runtime(length) or length <= SHORT_ROW:
        return False
    if any(i.is_reduction or i.is_scan for i in kernel.body):
        return False
    if any(i.dtype.itemsize > 4 for i in kernel.body if i.op != "const"):
        return False
    called = _called(kernel)
    return bool(called & _STEPPED) and (_is_small(kernel) or not called & _LARGE)


def is_ordered(kernel: Kernel, in_pairs: bool = False) -> bool:
    """Tell whether instructions of a kernel in step are to be put in order early.

    Args:
        kernel: A kernel that `is_stepped`.
        in_pairs: Whether it walks its rows two elements at a time.
    """
    return bool(_called(kernel) & (_LARGE | _IN_TWOS if in_pairs else _ORDERED))


def step_type(kernel: Kernel, in_pairs: bool = False) -> str:
    """Return the C++ type of what a loop writes for each element besides its results.

    Args:
        kernel: A kernel that `is_stepped`.
        in_pairs: Whether it walks its rows two elements at a time. Then eight vectors go in step,
            which also brings more of a row on its way at once; four where coefficients are many.
    """
    if in_pairs:
        return "unsigned short" if is_ordered(kernel, in_pairs) else "unsigned char"
    is_wide = bool(_called(kernel) & _IN_TWOS) and not _is_small(kernel)
    return "unsigned short" if is_wide else "unsigned char"


def _called(kernel: Kernel) -> set[str]:
    return {i.op for i in kernel.body}


def _is_small(kernel: Kernel) -> bool:
    return all(b.dtype.itemsize == 2 for b in kernel.buffers)
