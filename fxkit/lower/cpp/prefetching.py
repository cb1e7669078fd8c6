"""What a kernel asks for before it comes to it: rows behind each other, and lines far apart."""

from __future__ import annotations

import math

from fxkit.lower.cpp import text as cpp_text
from fxkit.lower.cpp.free_numbers import is_free
from fxkit.lower.loops.loop_ir import Access, Kernel
from fxkit.lower.loops.schedule import Pass, Schedule

# The processor foresees the lines of a long row, but not those of the rows that follow a short one.
# They are asked for so many bytes ahead where rows lie one behind the other, and fit no cache.
AHEAD = 4096
SHORT_BYTES = 1024
CACHED_BYTES = 1 << 21

# Where a row is gone through several times, memory is idle after the first. So the last pass asks
# for the next row, part by part, as long as it fits into the nearest cache beside this one. It does
# not where the first pass computes so much that lines arrive meanwhile.
ASKED = 256
NEXT_BYTES = 1 << 14

# Without AVX-512, only what is read is asked for, and for the second cache: on an EPYC with AVX2
# a norm takes two thirds, and a gradient of a softmax half, of what asking for all of it makes them
# take. Lines that lie a power of two apart replace each other in the first cache before their turn.
PREFETCHES = """\
#ifdef __AVX512F__
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


def short_rows(kernel: Kernel) -> list[Access]:
    """Return one access for each pointer to short rows, if those that follow are asked for."""
    if any(i.is_reduction or i.is_scan for i in kernel.body):
        return []
    length = kernel.row_sizes[-1]
    short = [
        access
        for access in _rows_behind_each_other(kernel)
        if length * kernel.buffers[access.buffer].dtype.itemsize <= SHORT_BYTES
    ]
    return short if _has_inputs(kernel, short) else []


def next_rows(kernel: Kernel, plan: Schedule, one: Pass) -> list[Access]:
    """Return one access for each pointer whose next row a pass asks for.

    Args:
        kernel: The kernel.
        plan: Its passes.
        one: The pass.
    """
    passes, length = plan.passes, kernel.row_sizes[-1]
    if len(passes) < 2 or one is not passes[-1] or one.reductions:
        return []
    if is_free(length) or length < ASKED:
        return []
    if any(cpp_text.calls_function(kernel.body[p]) for p in passes[0].values):
        return []
    found = _rows_behind_each_other(kernel)
    sizes = [kernel.buffers[access.buffer].dtype.itemsize for access in found]
    is_near = length * sum(sizes) <= NEXT_BYTES
    return found if is_near and _has_inputs(kernel, found) else []


def _has_inputs(kernel: Kernel, accesses: list[Access]) -> bool:
    return any(not kernel.buffers[access.buffer].is_output for access in accesses)


def _rows_behind_each_other(kernel: Kernel) -> list[Access]:
    """Return one access for each pointer to rows that follow each other, and fit no cache."""
    if not kernel.outer_sizes or len(kernel.outer_sizes) + 1 != len(kernel.sizes):
        return []
    if not all(type(size) is int for size in kernel.sizes):
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
