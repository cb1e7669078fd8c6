"""`to_cuda` for tests with tensors on the processor: they go to a GPU, and results come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxkit.lower import Policy, to_cuda


class OnGpu:
    """A program that runs on a GPU, and takes and returns tensors on the processor.

    What a call writes to its inputs is written to those on the processor too.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        there = pytree.tree_map_only(torch.Tensor, to_gpu, (args, kwargs))
        with torch.no_grad():
            results = self._program(*there[0], **there[1])
        for own, copied in zip(*map(pytree.tree_leaves, ((args, kwargs), there)), strict=True):
            if isinstance(own, torch.Tensor):
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
