"""A processor of your own: an interpreter of the loop IR in C++ runs whole models.

fxkit lowers a model to the core operators, and those that are loops to the loop IR. What is left
to a vendor are the instructions of the loop IR, here in `loop_ir_interpreter.cpp`, and the core
operators that are no loops, such as products of matrices, here taken from torch.

Run it: python examples/core_backend.py
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.ir.op import resolve
from fxkit.ir.types import short_dtype
from fxkit.lower import CompiledModule, Policy, to_backend
from fxkit.lower.building.build import build
from fxkit.lower.loop_ir.bits import Bits
from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel
from fxkit.passes import DecomposeForKernels, DecomposeToCore

SOURCE = Path(__file__).with_name("loop_ir_interpreter.cpp")

# Core operators that are no loops of the loop IR: torch computes them here.
FROM_TORCH = frozenset(
    f"aten.{name}"
    for name in """
        addmm bmm convolution mm
        index_put scatter_add sort topk
        detach empty expand permute select slice split_with_sizes squeeze unsqueeze view
    """.split()
)


def compile_for_core(gm: fx.GraphModule, args: tuple[Any, ...]) -> CompiledModule:
    """Return a graph as kernels of the interpreter; `fxkit.compile` takes this as its backend.

    Raises:
        UnsupportedError: When it holds an operator that this backend has not.
    """
    fxkit.PassManager([DecomposeToCore(), DecomposeForKernels()], args=args).run(gm)
    module = to_backend(gm, args, make=interpreted, policy=Policy(min_members=1))
    left = sorted(set(operators_left(module)) - FROM_TORCH)
    if left:
        raise UnsupportedError(f"expected core operators of this backend, got {', '.join(left)}")
    return module


def operators_left(module: CompiledModule) -> Iterable[str]:
    """Return the operators that a lowered graph calls beside its kernels."""
    kernels = set(module.plan.calls.values())
    for node in module.lowered.graph.nodes:
        call = None if node.target in kernels else resolve(node)
        if call is not None and not call.name.startswith(("python.", "guard.")):
            yield call.name


def interpreted(kernel: Kernel) -> Callable[..., int]:
    """Return a function of the addresses of a kernel's buffers."""
    library = interpreter()
    program = library.loops_make(program_of(kernel).encode())
    if not program:
        reason = library.loops_error().decode()
        raise UnsupportedError(f"expected instructions of the interpreter, got {reason}")
    pointers = ctypes.c_void_p * len(kernel.buffers)

    def run(*addresses_and_threads: int) -> int:
        return library.loops_run(program, pointers(*addresses_and_threads[:-1]))

    weakref.finalize(run, library.loops_free, program)
    return run


@functools.cache
def interpreter() -> ctypes.CDLL:
    """Build the interpreter, once on a machine, and load it."""
    library = build(SOURCE.read_text()).handle
    library.loops_make.restype = ctypes.c_void_p
    library.loops_error.restype = ctypes.c_char_p
    library.loops_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.loops_run.restype = ctypes.c_long
    library.loops_free.argtypes = [ctypes.c_void_p]
    return library


def program_of(kernel: Kernel) -> str:
    """Return a kernel as words for the interpreter."""
    if not kernel.row_rank and kernel.sizes:  # points in a row are computed together
        kernel = replace(kernel, row_rank=1)
    words: list[Any] = [len(kernel.sizes), kernel.row_rank, *kernel.sizes, len(kernel.buffers)]
    words += [short_dtype(buffer.dtype) for buffer in kernel.buffers]
    words.append(len(kernel.body))
    for instruction, is_wide in zip(kernel.body, kernel.row_wide, strict=True):
        words += [*_instruction(instruction, is_wide)]
    words.append(len(kernel.stores))
    for store in kernel.stores:
        words += [*_access(store.access), store.value, int(store.is_sum)]
    return " ".join(map(str, words))


def _instruction(it: Instruction, is_wide: bool) -> Iterable[Any]:
    yield from (it.op, short_dtype(it.dtype), int(is_wide), len(it.operands), *it.operands)
    detail = it.detail
    if isinstance(detail, Access):
        yield from _access(detail)
    if it.op == "load":
        yield int(it.guard is not None)
    if isinstance(detail, Access) and detail.otherwise is not None:
        yield _number(detail.otherwise.value)
    elif isinstance(detail, Bits):
        yield _number(detail.value)
    elif isinstance(detail, torch.dtype):
        yield short_dtype(detail)


def _access(access: Access) -> Iterable[int]:
    return (access.buffer, access.offset, *access.strides, len(access.scales), *access.scales)


def _number(value: bool | int | float) -> str:
    return value.hex() if isinstance(value, float) else str(int(value))


def main() -> None:
    """Run a small model, and say what it took."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Softmax(-1)
    ).eval()
    x = torch.randn(5, 8)
    program = fxkit.compile(model, backend=compile_for_core)
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x))
    module = compile_for_core(fxkit.capture(model, (x,)).graph_module, (x,))
    print("torch computed:", sorted(operators_left(module)))
    print("instructions:", sorted({i.op for k in module.kernels.values() for i in k.body}))


if __name__ == "__main__":
    main()
