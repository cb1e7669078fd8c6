"""Loop IR → CUDA text. Pure: the same kernels give the same text, and nothing else is touched.

The text includes no header. Each kernel is a function of the processor, which takes the addresses
of its buffers, of scratch memory and of the stream, and launches one function of the GPU or
several. Where a buffer does not begin at a multiple of sixteen bytes, it launches functions that
read and write element by element.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cuda.columns import CudaColumnPrinter
from fxkit.lower.codegen.cuda.kernel_printer import CudaPrinter, Launch
from fxkit.lower.codegen.cuda.layout import ThreadGroup, lay_out
from fxkit.lower.codegen.cuda.points import PointPrinter
from fxkit.lower.codegen.cuda.reducing import ReducingPrinter
from fxkit.lower.codegen.cuda.rows import CudaRowPrinter
from fxkit.lower.codegen.cuda.text import for_device, preamble
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.axis_order import with_a_row, with_an_axis

# What a buffer's address is a multiple of where it is read and written by sixteen bytes.
ALIGNMENT = 16

_PRINTERS = {
    ThreadGroup.POINTS: PointPrinter,
    ThreadGroup.ROWS: CudaRowPrinter,
    ThreadGroup.COLUMNS: CudaColumnPrinter,
}


def print_unit(kernels: Mapping[str, Kernel]) -> str:
    """Return a translation unit for nvcc.

    Args:
        kernels: Name → kernel; none that `layout.objection` speaks of.
    """
    texts = [print_kernel(kernel, name) for name, kernel in kernels.items()]
    return "\n".join([preamble(kernels.values()), *texts])


def print_kernel(kernel: Kernel, name: str) -> str:
    """Return the text of one kernel: its functions for the GPU, and the one that launches them."""
    printers = printers_of(kernel, name)
    launches = [printer.launches() for printer in printers]
    texts = [for_device(launch.text) for some in launches for launch in some]
    return "\n".join([*texts, _launcher(kernel, name, printers, launches)])


def printers_of(kernel: Kernel, name: str) -> list[CudaPrinter]:
    """Return what prints a kernel for buffers that are aligned, and what does for all others."""
    kernel = with_an_axis(with_a_row(kernel))
    layouts = {"": lay_out(kernel)}
    if layouts[""].width > 1:
        layouts["_loose"] = lay_out(kernel, 1)
    return [
        _PRINTERS[layout.family](kernel, f"{name}_gpu{suffix}", layout)
        for suffix, layout in layouts.items()
    ]


def scratch_bytes(kernel: Kernel) -> int:
    """Return the bytes of scratch memory that a launch of a kernel needs."""
    printers = printers_of(kernel, "kernel")
    return max(p.scratch_bytes if isinstance(p, ReducingPrinter) else 0 for p in printers)


def _launcher(
    kernel: Kernel, name: str, printers: list[CudaPrinter], launches: list[list[Launch]]
) -> str:
    """Return the function that launches a kernel; it returns CUDA's error, 0 for none."""
    lines = [
        f'extern "C" int {name}(void* const* buffers, void* scratch, void* stream, int device) {{',
        "  FX_DEVICE(device);",
    ]
    aligned, *others = [_calls(kernel, one) for one in launches]
    if others:
        addresses = " | ".join(
            f"(unsigned long)buffers[{position}]" for position in range(len(kernel.buffers))
        )
        lines.append(f"  if ((({addresses}) & {ALIGNMENT - 1}) == 0) {{")
        lines += ["    " + call for call in aligned]
        lines += ["  } else {", *("    " + call for call in others[0]), "  }"]
    else:
        lines += ["  " + call for call in aligned]
    return "\n".join([*lines, "  return FX_ERROR();", "}"]) + "\n"


def _calls(kernel: Kernel, launches: list[Launch]) -> list[str]:
    types = [f"{'' if b.is_output else 'const '}{cpp_text.TYPES[b.dtype]}*" for b in kernel.buffers]
    arguments = [f"({type_})buffers[{position}]" for position, type_ in enumerate(types)]
    return [
        f"FX_LAUNCH({one.name}, {one.across}, {one.down}, {one.threads}, stream, "
        + ", ".join([*arguments, *(["(char*)scratch"] if "char* scratch" in one.text else [])])
        + ");"
        for one in launches
        if one.across and one.down
    ]
