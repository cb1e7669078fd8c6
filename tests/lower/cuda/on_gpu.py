"""`to_cuda` for tests with tensors on the processor: they go to a GPU, and results come back."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxkit.lower import CompiledModule, Policy, to_cuda
from fxkit.lower.running.lower_report import Region


class OnGpu:
    """A module for a GPU that takes and returns tensors on the processor.

    What a call writes to its inputs is written to those on the processor too.
    """

    def __init__(self, module: CompiledModule) -> None:
        self._module = module

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._module.regions

    @property
    def source(self) -> str:
        return self._module.source

    def report(self) -> Any:
        return self._module.report()

    def __call__(self, *inputs: torch.Tensor) -> Any:
        there = tuple(map(to_gpu, inputs))
        with torch.no_grad():
            results = self._module(*there)
        for own, copied in zip(inputs, there, strict=True):
            own.untyped_storage().copy_(copied.untyped_storage())
        return pytree.tree_map_only(torch.Tensor, from_gpu, results)


def lower_on_gpu(gm: fx.GraphModule, args: tuple[Any, ...]) -> OnGpu:
    """Compile a graph on the processor for inputs on a GPU, every operator that has a kernel."""
    return OnGpu(to_cuda(gm, tuple(map(to_gpu, args)), policy=Policy(min_members=1)))


def to_gpu(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the GPU that lies in memory as this one does."""
    return _moved(x, "cuda")


def from_gpu(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the processor that lies in memory as this one does."""
    return _moved(x, "cpu")


def _moved(x: torch.Tensor, device: str) -> torch.Tensor:
    size = x.untyped_storage().nbytes() // x.itemsize
    memory = torch.empty(0, dtype=x.dtype, device=x.device)
    memory.set_(x.untyped_storage(), 0, (size,))
    return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
