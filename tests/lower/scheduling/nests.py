"""Kernels by hand, and what one transformation makes of their loops."""

from __future__ import annotations

import torch

from fxkit.lower.loop_ir.bits import Bits
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Instruction, Kernel, Store
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_interpreter import interpret_nest
from fxkit.lower.loop_ir.nest_verifier import verify_nest
from fxkit.lower.scheduling.gpu.nest_pass import NestPass
from fxkit.lower.scheduling.pipelines import steps
from tests.lower.kernels import difference

F32 = torch.float32

# Kernels of more points are interpreted after the last pass only, in `test_pipelines.py`.
MAX_POINTS = 100_000


def doubled(*sizes: int) -> Kernel:
    """Return a kernel of `x * 2` for a contiguous tensor."""
    strides = torch.empty(sizes, device="meta").stride()
    body = (
        Instruction("load", (), F32, Access(0, strides)),
        Instruction("const", (), F32, Bits(2.0)),
        Instruction("mul", (0, 1), F32),
    )
    return Kernel(sizes, 0, _buffers(), body, (Store(Access(1, strides), 2),))


def centred(rows: int, length: int) -> Kernel:
    """Return a kernel of `x / x.amax(-1, keepdim=True)` for a contiguous tensor."""
    strides = (length, 1)
    body = (
        Instruction("load", (), F32, Access(0, strides)),
        Instruction("reduce_max", (0,), F32),
        Instruction("div", (0, 1), F32),
    )
    return Kernel((rows, length), 1, _buffers(), body, (Store(Access(1, strides), 2),))


def summed(rows: int, length: int, *, down: bool = False) -> Kernel:
    """Return a kernel that sums the rows, or the columns, of a contiguous tensor."""
    strides = (1, rows) if down else (length, 1)
    body = (
        Instruction("load", (), F32, Access(0, strides)),
        Instruction("reduce_add", (0,), F32),
    )
    return Kernel((rows, length), 1, _buffers(), body, (Store(Access(1, (1, 0)), 1),))


def running(rows: int, length: int, *, down: bool = False) -> Kernel:
    """Return a kernel of `x.cumsum(-1)`, or of `x.cumsum(0)`, for a contiguous tensor."""
    strides = (1, rows) if down else (length, 1)
    body = (
        Instruction("load", (), F32, Access(0, strides)),
        Instruction("scan_add", (0,), F32),
    )
    return Kernel((rows, length), 1, _buffers(), body, (Store(Access(1, strides), 1),))


def _buffers() -> tuple[Buffer, ...]:
    return (Buffer("in0", F32, False), Buffer("out0", F32, True))


def before_and_after(
    kernel: Kernel, transformation: type[NestPass], *, is_aligned: bool = True
) -> tuple[LoopNest, LoopNest]:
    """Return the nest before a pass of the pipeline for a GPU, and after it; both are checked."""
    found = list(steps(kernel, is_aligned=is_aligned))
    names = [name for name, _ in found]
    position = names.index(transformation.__name__)
    before, after = found[position - 1][1], found[position][1]
    for nest in (before, after):
        verify_nest(nest)
        if kernel.points <= MAX_POINTS:
            computes_its_kernel(nest)
    return before, after


def computes_its_kernel(nest: LoopNest) -> None:
    """Compare what a nest computes with what its kernel means."""
    kernel = nest.kernel
    generator = torch.Generator().manual_seed(7)
    source = torch.rand(kernel.points, generator=generator) + 0.5
    count = kernel.points if any(kernel.stores[0].access.strides[-1:]) else kernel.sizes[0]
    found, expected = torch.full((count,), torch.nan), torch.full((count,), torch.nan)
    assert interpret_nest(nest, [source], [found])
    assert interpret(kernel, [source], [expected])
    assert difference(found, expected) <= 8
