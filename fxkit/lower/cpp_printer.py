"""Loop IR → C++ text. Pure: the same kernels give the same text, and nothing else is touched.

The text includes no header. Each kernel is one function of its buffers and the number of threads.
Rows are divided among threads; along a row the compiler makes vector code of plain loops.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxkit.lower.codegen.cpp.columns import ColumnPrinter
from fxkit.lower.codegen.cpp.flattened_rows import FlattenedRowsPrinter, flattened_rows
from fxkit.lower.codegen.cpp.kernel_printer import KernelPrinter
from fxkit.lower.codegen.cpp.loop_form import with_loops
from fxkit.lower.codegen.cpp.packed_bfloat16 import PackedBfloat16Printer, is_packed_bfloat16
from fxkit.lower.codegen.cpp.preamble import preamble_parts
from fxkit.lower.codegen.cpp.rows import RowPrinter
from fxkit.lower.codegen.cpp.summing import SummingPrinter
from fxkit.lower.codegen.cpp.tiles import TilePrinter, crossing_axis
from fxkit.lower.codegen.cpp.transposed_tiles import TransposedTilesPrinter, is_transposed
from fxkit.lower.codegen.cpp.used_definitions import used_definitions
from fxkit.lower.families.family import WholePrinter, printer_of, texts_below
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.axis_order import runs_down_columns


def print_unit(kernels: Mapping[str, Kernel], glibc: tuple[int, int] | None) -> str:
    """Return a translation unit.

    Args:
        kernels: Name → kernel.
        glibc: Version of the C library on x86-64, or None where it has no vector functions.
    """
    texts = [print_kernel(kernel, name) for name, kernel in kernels.items()]
    below = texts_below(kernels.values())
    definitions = preamble_parts(kernels.values(), texts, below, glibc)
    return "\n".join([used_definitions(definitions, texts), *texts])


def print_kernel(kernel: Kernel, name: str) -> str:
    """Return the text of one kernel."""
    return kernel_printer(kernel, name).text()


def show_schedule(kernel: Kernel) -> str:
    """Say in which form a kernel is computed, and what each sweep over a row does."""
    printer = kernel_printer(kernel, "kernel")
    form = (type(printer).__doc__ or "").partition("\n")[0]
    head = f"{type(printer).__name__}: {form}"
    return f"{head}\n{printer.schedule}" if isinstance(printer, KernelPrinter) else head


def kernel_printer(kernel: Kernel, name: str) -> KernelPrinter | WholePrinter:
    """Return what prints a kernel: it stands for the form that the kernel is computed in."""
    whole = printer_of(kernel)
    if whole is not None:
        return whole(kernel, name)
    if kernel.has_sums:
        return SummingPrinter(kernel, name)
    kernel = with_loops(kernel)
    if crossing_axis(kernel) is not None:
        return TilePrinter(kernel, name)
    joined = flattened_rows(kernel)
    if joined is not None:
        return FlattenedRowsPrinter(joined, name)
    if runs_down_columns(kernel):
        return ColumnPrinter(kernel, name)
    if is_transposed(kernel):
        return TransposedTilesPrinter(kernel, name)
    printer = PackedBfloat16Printer if is_packed_bfloat16(kernel) else RowPrinter
    return printer(kernel, name)
