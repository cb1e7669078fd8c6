"""Loop IR → C++ text. Pure: the same kernels give the same text, and nothing else is touched.

The text includes no header. Each kernel is one function of its buffers and the number of threads.
Rows are divided among threads; along a row the compiler makes vector code of plain loops.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp import vector_math
from fxkit.lower.codegen.cpp.columns import ColumnPrinter, runs_down_columns
from fxkit.lower.codegen.cpp.flattened_rows import FlattenedRowsPrinter, flattened_rows
from fxkit.lower.codegen.cpp.float16_staging import HALVES
from fxkit.lower.codegen.cpp.lane_text import LANES
from fxkit.lower.codegen.cpp.non_temporal_stores import STREAMS
from fxkit.lower.codegen.cpp.packed_bfloat16 import PAIRS, PackedBfloat16Printer, is_packed_bfloat16
from fxkit.lower.codegen.cpp.prefetching import PREFETCHES
from fxkit.lower.codegen.cpp.row_sums import WHOLE_LOOPS
from fxkit.lower.codegen.cpp.rows import RowPrinter
from fxkit.lower.codegen.cpp.runtime_parameters import free_numbers
from fxkit.lower.codegen.cpp.summing import SummingPrinter
from fxkit.lower.codegen.cpp.tiles import TRANSPOSE, TilePrinter, crossing_axis
from fxkit.lower.codegen.cpp.transposed_tiles import TURN, TransposedTilesPrinter, is_transposed
from fxkit.lower.codegen.cpp.unroll_and_jam import IN_STEP, is_stepped
from fxkit.lower.families.family import printer_of, texts_below
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.axis_order import with_an_axis
from fxkit.lower.scheduling.unrolling import is_short, unrolled


def print_unit(kernels: Mapping[str, Kernel], glibc: tuple[int, int] | None) -> str:
    """Return a translation unit.

    Args:
        kernels: Name → kernel.
        glibc: Version of the C library on x86-64, or None where it has no vector functions.
    """
    texts = [print_kernel(kernel, name) for name, kernel in kernels.items()]
    return "\n".join([_preamble(kernels.values(), texts, glibc), *texts])


def _preamble(
    kernels: Collection[Kernel], texts: Collection[str], glibc: tuple[int, int] | None
) -> str:
    own: set[str] = set()
    library: set[tuple[str, torch.dtype]] = set()
    composed: set[str] = set()
    for kernel in kernels:
        storage = {buffer.dtype for buffer in kernel.buffers}
        storage |= {i.detail for i in kernel.body if i.op == "round"}
        own |= cpp_text.own_functions(kernel.body, storage)
        library |= cpp_text.library_functions(kernel.body)
        composed |= cpp_text.composed_functions(kernel.body)
    parts = [vector_math.BASICS, cpp_text.MINMAX]
    ordered = sorted(library, key=str)
    parts += [cpp_text.declaration(op, dtype, glibc) for op, dtype in ordered]
    parts += sorted(composed)
    parts.append(vector_math.definitions(own))
    parts.append(_REDUCTIONS)
    is_turning = any("fx_transpose(" in text or "fx_turn(" in text for text in texts)
    if any("FX_ASK" in text for text in texts) or is_turning:
        parts.append(PREFETCHES)
    if is_turning:
        parts.append(TRANSPOSE)
    if any("fx_turn(" in text for text in texts):
        parts.append(TURN)
    if any(is_stepped(_with_long_row(kernel)) for kernel in kernels):
        parts.append(IN_STEP)
    if any("FX_WHOLE_LOOPS" in text for text in texts):
        parts.append(WHOLE_LOOPS)
    if any("fx_fence()" in text for text in texts):
        parts.append(STREAMS)
    if any(_uses_halves(text) for text in texts):
        parts.append(HALVES)
    if any("fx_pair" in text for text in texts):
        parts.append(PAIRS)
    below = texts_below(kernels)
    if any("FX_WIDE" in text for text in (*texts, *below)):
        parts.append(LANES)
    parts += below
    return "\n".join(parts)


def _uses_halves(text: str) -> bool:
    return any(f"fx_{name}(" in text for name in ("widen", "narrow", "round_halves", "sum_halves"))


_TYPES = "float, double, long, int, short, signed char, unsigned char, bool"
_REDUCTIONS = "".join(
    f"#pragma omp declare reduction({name} : {_TYPES} : omp_out = {name}(omp_out, omp_in)) "
    "initializer(omp_priv = omp_orig)\n"
    for name in ("fx_max", "fx_min")
)


def print_kernel(kernel: Kernel, name: str) -> str:
    """Return the text of one kernel."""
    whole = printer_of(kernel)
    if whole is not None:
        return whole(kernel, name).text()
    if kernel.has_sums:
        return SummingPrinter(kernel, name).text()
    kernel = _with_loops(kernel)
    if crossing_axis(kernel) is not None:
        return TilePrinter(kernel, name).text()
    joined = flattened_rows(kernel)
    if joined is not None:
        return FlattenedRowsPrinter(joined, name).text()
    if runs_down_columns(kernel):
        return ColumnPrinter(kernel, name).text()
    if is_transposed(kernel):
        return TransposedTilesPrinter(kernel, name).text()
    printer = PackedBfloat16Printer if is_packed_bfloat16(kernel) else RowPrinter
    return printer(kernel, name).text()


def _with_long_row(kernel: Kernel) -> Kernel:
    """Return a kernel as its loops along rows see it."""
    kernel = _with_loops(kernel)
    joined = flattened_rows(kernel)
    return kernel if joined is None else joined.kernel


def _with_loops(kernel: Kernel) -> Kernel:
    """Return a kernel with a row, but without short ones across memory."""
    kernel = _with_row(kernel)
    if not free_numbers(kernel) and is_short(kernel):
        return _with_row(unrolled(kernel))
    return kernel


def _with_row(kernel: Kernel) -> Kernel:
    """Make the innermost axis of a kernel without reductions its row."""
    return kernel if kernel.row_rank else replace(with_an_axis(kernel), row_rank=1)
