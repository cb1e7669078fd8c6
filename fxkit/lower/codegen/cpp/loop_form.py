"""A kernel in the form that its loops are printed from: with a row, and short rows written out."""

from __future__ import annotations

from dataclasses import replace

from fxkit.lower.codegen.cpp.runtime_parameters import runtime_parameters
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.axis_order import with_an_axis
from fxkit.lower.scheduling.unrolling import is_short, unrolled


def with_loops(kernel: Kernel) -> Kernel:
    """Return a kernel with a row, but without short ones across memory."""
    kernel = _with_row(kernel)
    if not runtime_parameters(kernel) and is_short(kernel):
        return _with_row(unrolled(kernel))
    return kernel


def _with_row(kernel: Kernel) -> Kernel:
    """Make the innermost axis of a kernel without reductions its row."""
    return kernel if kernel.row_rank else replace(with_an_axis(kernel), row_rank=1)
