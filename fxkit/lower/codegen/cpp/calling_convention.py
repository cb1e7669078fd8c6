"""The calling convention of all kernels: one array of pointers."""

from __future__ import annotations

from collections.abc import Mapping

from fxkit.lower.codegen.cpp.text import MEMORY
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import runtime_parameters

SUFFIX = "_packed"


def print_packed(kernels: Mapping[str, Kernel]) -> str:
    """Return, for each kernel, a function of its buffers' addresses and the number of threads.

    The address of the numbers that a kernel reads at run time follows those of its buffers.
    It returns zero, or else what the kernel has written is void.
    """
    return "\n".join(_function(name, kernel) for name, kernel in kernels.items())


def _function(name: str, kernel: Kernel) -> str:
    types = [f"{'' if b.is_output else 'const '}{MEMORY[b.dtype]}*" for b in kernel.buffers]
    arguments = [f"({type_})buffers[{position}]" for position, type_ in enumerate(types)]
    if runtime_parameters(kernel):
        arguments.append(f"(const long*)buffers[{len(types)}]")
    call = f"{name}({', '.join([*arguments, 'threads'])})"
    body = f"return {call};" if kernel.may_fail else f"{call};\n  return 0;"
    return f'extern "C" long {name}{SUFFIX}(void* const* buffers, long threads) {{\n  {body}\n}}\n'
