"""Loop IR → CUDA text. Pure: the same kernels give the same text, and nothing else is touched.

The text includes no header. Each kernel is a function of the processor, which takes the addresses
of its buffers, of scratch memory and of the stream, and launches one function of the GPU or
several. Where a buffer does not begin at a multiple of sixteen bytes, it launches functions that
read and write element by element.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cuda.nest_printer import CudaNestPrinter, Launch
from fxkit.lower.codegen.cuda.text import for_device, preamble
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.scheduling.pipelines import scheduled

# What a buffer's address is a multiple of where it is read and written by sixteen bytes.
ALIGNMENT = 16


def print_unit(kernels: Mapping[str, Kernel]) -> str:
    """Return a translation unit for nvcc.

    Args:
        kernels: Name → kernel; none that `choose_thread_mapping.objection` speaks of.
    """
    texts = [print_kernel(kernel, name) for name, kernel in kernels.items()]
    return "\n".join([preamble(kernels.values()), *texts])


def print_kernel(kernel: Kernel, name: str) -> str:
    """Return the text of one kernel: its functions for the GPU, and the one that launches them."""
    suffixes = ("", "_loose")
    printers = [
        CudaNestPrinter(nest, f"{name}_gpu{suffix}")
        for nest, suffix in zip(nests_of(kernel), suffixes, strict=False)
    ]
    launches = [printer.launches() for printer in printers]
    texts = [for_device(launch.text) for some in launches for launch in some]
    return "\n".join([*texts, _launcher(kernel, name, launches)])


@functools.lru_cache(maxsize=256)
def nests_of(kernel: Kernel) -> tuple[LoopNest, ...]:
    """Return the loops of a kernel for buffers that are aligned, and those for all others."""
    aligned = scheduled(kernel)
    has_vectors = aligned.mapping is not None and aligned.mapping.width > 1
    return (aligned, scheduled(kernel, is_aligned=False)) if has_vectors else (aligned,)


def scratch_bytes(kernel: Kernel) -> int:
    """Return the bytes of scratch memory that a launch of a kernel needs."""
    return max(nest.scratch_bytes for nest in nests_of(kernel))


def _launcher(kernel: Kernel, name: str, launches: list[list[Launch]]) -> str:
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
