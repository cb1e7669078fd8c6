"""The loops of kernels of random programs are sound, and compute what the kernels mean."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from fxkit.lower.compiling.cuda_lowering import CudaPolicy
from fxkit.lower.compiling.inferred_types import typed
from fxkit.lower.compiling.kernel_builds import BuiltKernels
from fxkit.lower.compiling.pipeline import KernelTarget, lower_typed
from fxkit.lower.compiling.whole_operators import Choosing
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Kernel
from fxkit.lower.loop_ir.nest_interpreter import interpret_nest
from fxkit.lower.loop_ir.nest_verifier import verify_nest
from fxkit.lower.scheduling.pipelines import scheduled, steps
from tests.lower.kernels import difference
from tests.lower.random_programs import random_program


def kernels_of(seed: int) -> Iterator[Kernel]:
    """Yield the kernels for a GPU of a random program."""
    gm, args = random_program(Random(seed))
    typed(gm, args)
    policy = CudaPolicy(min_members=1, gpu=torch.device("cpu"))
    never = Choosing.all_library("it is left to torch's library")
    target = KernelTarget(never, build=lambda kernels: BuiltKernels())
    yield from lower_typed(gm, policy, target).kernels.values()


def memory_of(kernel: Kernel, position: int, buffer: Buffer) -> torch.Tensor:
    """Return memory for a buffer, with small positive numbers that serve as indices too."""
    accesses: list[Access] = [
        i.detail for i in kernel.body if i.op == "load" and i.detail.buffer == position
    ]
    accesses += [s.access for s in kernel.stores if s.access.buffer == position]
    spans = [
        abs(a.offset)
        + sum(abs(step) * size for step, size in zip(a.strides, kernel.sizes, strict=True))
        for a in accesses
    ]
    count = max(spans, default=0) + 64
    generator = torch.Generator().manual_seed(position)
    if buffer.dtype.is_floating_point:
        return (torch.rand(count, generator=generator) + 0.25).to(buffer.dtype)
    return torch.randint(0, 3, (count,), generator=generator).to(buffer.dtype)


def hold_to_its_kernel(kernel: Kernel, is_aligned: bool) -> None:
    memory = [memory_of(kernel, p, buffer) for p, buffer in enumerate(kernel.buffers)]
    pairs = list(zip(memory, kernel.buffers, strict=True))
    inputs = [tensor for tensor, buffer in pairs if not buffer.is_output]
    found, expected = (
        [torch.zeros_like(tensor) for tensor, buffer in pairs if buffer.is_output] for _ in range(2)
    )
    for _, nest in steps(kernel, is_aligned=is_aligned):
        verify_nest(nest)
    holds = interpret_nest(scheduled(kernel, is_aligned=is_aligned), inputs, found)
    assert holds == interpret(kernel, inputs, expected)
    for one, other in zip(found, expected, strict=True):
        # A function of float32 is rounded once more or less by torch, which float64 shows.
        same = (t.float() if t.dtype == torch.float64 else t for t in (one, other))
        assert difference(*same) <= 16, kernel


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_loops_of_random_programs_compute_their_kernels(seed: int, is_aligned: bool) -> None:
    for kernel in kernels_of(seed):
        hold_to_its_kernel(kernel, is_aligned)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20))
def test_loops_of_many_random_programs_compute_their_kernels(part: int) -> None:
    for seed in range(part * 20, part * 20 + 20):
        for kernel in kernels_of(seed):
            hold_to_its_kernel(kernel, is_aligned=bool(seed % 2))
