"""Software prefetch: rows at a distance, and cache lines that the hardware does not foresee."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.runtime_parameters import ceil_div, is_runtime
from fxkit.lower.loop_ir.loop_ir import Access, Kernel
from fxkit.lower.scheduling.row_sweeps import RowSweep, Schedule

# The processor foresees the lines of a long row, but not those of the rows that follow a short one.
# They are asked for so many bytes ahead, where they fit no cache. Where they lie apart, that is so
# many rows along an axis that is at least eight times as long.
AHEAD = 4096
SHORT_BYTES = 1024
CACHED_BYTES = 1 << 21
LONG_AXIS = 8

# Where a row is gone through several times, memory is idle after the first. So the last sweep asks
# for the next row, part by part, as long as it fits into the nearest cache beside this one. It does
# not where the first sweep computes so much that lines arrive meanwhile.
ASKED = 256
NEXT_BYTES = 1 << 14

# Where vectors are short, and on AMD's processors, only what is read is asked for, and for the
# second cache: on EPYCs a norm takes two thirds, a gradient of a softmax half, and a transposed sum
# three quarters, of what asking for all of it in the first cache makes them take. Lines that lie a
# power of two apart replace each other there before their turn.
PREFETCHES = """\
#if defined(__AVX512F__) && !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
#define FX_ASK(line) __builtin_prefetch(line, 0)
#define FX_ASK_TO_WRITE(line) __builtin_prefetch(line, 1)
#else
#define FX_ASK(line) __builtin_prefetch(line, 0, 2)
#define FX_ASK_TO_WRITE(line)
#endif
"""


def prefetch(line: str, is_output: bool) -> str:
    """Return the statement that asks for a line of memory.

    Args:
        line: An address in it, as text.
        is_output: Whether it is going to be written.
    """
    return f"FX_ASK_TO_WRITE({line});" if is_output else f"FX_ASK({line});"


def short_rows(kernel: Kernel) -> dict[Access, int]:
    """Return one access for each pointer to short rows, if those that follow are asked for.

    With each comes how many elements ahead a row is asked for.
    """
    if kernel.folds_rows:
        return {}
    length = kernel.row_sizes[-1]
    short = {
        access: AHEAD // kernel.buffers[access.buffer].dtype.itemsize
        for access in _rows_behind_each_other(kernel)
        if length * kernel.buffers[access.buffer].dtype.itemsize <= SHORT_BYTES
    }
    short |= {access: ahead for access, ahead in _rows_apart(kernel).items() if access not in short}
    return short if _has_inputs(kernel, short) else {}


def _rows_apart(kernel: Kernel) -> dict[Access, int]:
    """Return one access for each pointer to short rows that lie apart, and fit no cache.

    With each comes how far it is to a row that is read as many rows later as are asked for.
    """
    if is_runtime(kernel.row_sizes[-1]) or not _has_known_sizes(kernel) or kernel.row_rank != 1:
        return {}
    found: dict[tuple[int, tuple[int, ...], int], tuple[Access, int]] = {}
    for instruction in kernel.body:
        if instruction.op != "load" or instruction.operands:
            continue
        access = instruction.detail
        size = kernel.buffers[access.buffer].dtype.itemsize
        row = kernel.row_sizes[-1] * size
        is_apart = access.strides[-1] == 1 and all(access.strides) and row <= SHORT_BYTES
        if is_apart and math.prod(kernel.sizes) * size >= CACHED_BYTES:
            ahead = _row_later(kernel.outer_sizes, access.strides, ceil_div(AHEAD, row))
            if ahead:
                found.setdefault(
                    (access.buffer, access.strides[:-1], access.offset), (access, ahead)
                )
    return dict(found.values())


def _row_later(sizes: tuple[int, ...], strides: tuple[int, ...], rows: int) -> int:
    """Return how far it is to what is read about so many rows later; 0 where that is no one step.

    A step along an axis is taken where the axis is long, so that few steps lead beyond it.
    """
    below = 1
    for size, stride in zip(reversed(sizes), reversed(strides[: len(sizes)]), strict=True):
        steps = ceil_div(rows, below)
        if size >= LONG_AXIS * steps:
            return steps * stride
        below *= size
        if below > 4 * rows:
            return 0
    return 0


def next_rows(kernel: Kernel, plan: Schedule, one: RowSweep) -> list[Access]:
    """Return one access for each pointer whose next row a sweep asks for.

    Args:
        kernel: The kernel.
        plan: Its sweeps.
        one: The sweep.
    """
    sweeps, length = plan.sweeps, kernel.row_sizes[-1]
    if len(sweeps) < 2 or one is not sweeps[-1] or one.reductions:
        return []
    if is_runtime(length) or length < ASKED:
        return []
    if any(cpp_text.calls_function(kernel.body[p]) for p in sweeps[0].values):
        return []
    found = _rows_behind_each_other(kernel)
    sizes = [kernel.buffers[access.buffer].dtype.itemsize for access in found]
    is_near = length * sum(sizes) <= NEXT_BYTES
    return found if is_near and _has_inputs(kernel, found) else []


def _has_known_sizes(kernel: Kernel) -> bool:
    return all(type(size) is int for size in kernel.sizes)


def _has_inputs(kernel: Kernel, accesses: Iterable[Access]) -> bool:
    return any(not kernel.buffers[access.buffer].is_output for access in accesses)


def _rows_behind_each_other(kernel: Kernel) -> list[Access]:
    """Return one access for each pointer to rows that follow each other, and fit no cache."""
    if not kernel.outer_sizes or len(kernel.outer_sizes) + 1 != len(kernel.sizes):
        return []
    if not _has_known_sizes(kernel):
        return []
    length = kernel.row_sizes[-1]
    loads = [i.detail for i in kernel.body if i.op == "load" and not i.detail.scales]
    found: dict[tuple[int, tuple[int, ...], int], Access] = {}
    for access in [*loads, *(store.access for store in kernel.stores)]:
        size = kernel.buffers[access.buffer].dtype.itemsize
        is_dense = access.strides[-2:] == (length, 1) and all(access.strides)
        if is_dense and math.prod(kernel.sizes) * size >= CACHED_BYTES:
            found.setdefault((access.buffer, access.strides[:-1], access.offset), access)
    return list(found.values())
