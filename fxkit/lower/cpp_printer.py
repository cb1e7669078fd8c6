"""Loop IR → C++ text. Pure: the same kernels give the same text, and nothing else is touched.

The text includes no header. Each kernel is one function of its buffers and the number of threads.
Rows are divided among threads; along a row the compiler makes vector code of plain loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fxkit.lower.codegen.cpp.columns import ColumnPrinter
from fxkit.lower.codegen.cpp.flattened_rows import FlattenedRowsPrinter
from fxkit.lower.codegen.cpp.kernel_printer import KernelPrinter
from fxkit.lower.codegen.cpp.packed_bfloat16 import PackedBfloat16Printer
from fxkit.lower.codegen.cpp.preamble import preamble_parts
from fxkit.lower.codegen.cpp.rows import RowPrinter
from fxkit.lower.codegen.cpp.summing import SummingPrinter
from fxkit.lower.codegen.cpp.tiles import TilePrinter
from fxkit.lower.codegen.cpp.transposed_tiles import TransposedTilesPrinter
from fxkit.lower.codegen.cpp.used_definitions import used_definitions
from fxkit.lower.families.family import printer_of, texts_below
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    AcrossRows,
    AcrossTransposedRows,
    AlongFlattenedRows,
    AlongPackedRows,
    AlongRows,
    AlongSummedRows,
    CpuSchedule,
    InCrossingTiles,
    Traversal,
)
from fxkit.lower.scheduling.pipelines import cpu_schedule
from fxkit.lower.scheduling.row_sweeps import plan_sweeps

# What prints a kernel whose points are computed in an order.
_PRINTERS: dict[type[Traversal], Callable[[CpuSchedule, str], KernelPrinter]] = {
    AlongRows: RowPrinter,
    AlongSummedRows: SummingPrinter,
    AlongPackedRows: PackedBfloat16Printer,
    AlongFlattenedRows: FlattenedRowsPrinter,
    AcrossRows: ColumnPrinter,
    AcrossTransposedRows: TransposedTilesPrinter,
    InCrossingTiles: TilePrinter,
}


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
    whole = printer_of(kernel)
    if whole is not None:
        return whole(kernel, name).text()
    schedule = cpu_schedule(kernel)
    assert schedule.traversal is not None
    return _PRINTERS[type(schedule.traversal)](schedule, name).text()


def show_schedule(kernel: Kernel) -> str:
    """Say how a kernel is computed on a CPU, and what each sweep over a row does."""
    whole = printer_of(kernel)
    if whole is None:
        schedule = cpu_schedule(kernel)
        is_rewritten = schedule.kernel.body != kernel.body
        rewritten = f"\nof the kernel as it is computed:\n{schedule.kernel}"
        return f"{schedule}{rewritten if is_rewritten else ''}"
    form = (whole.__doc__ or "").partition("\n")[0]
    return f"{whole.__name__}: {form}\n{plan_sweeps(kernel)}"
