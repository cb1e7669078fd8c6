"""A look leaves no trace: buffers, inputs and the stream of random numbers are put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fxkit.torch_adapters import pytree


@contextlib.contextmanager
def state_kept(module: torch.nn.Module, inputs: Any, device: torch.device) -> Iterator[None]:
    """Put back what runs of a module write: its buffers, its inputs, and random generators.

    Args:
        module: The module; a parameter that it writes stays written.
        inputs: Its inputs, nested.
        device: The device whose generator it may draw from, beside the CPU's.
    """
    found = (*module.buffers(), *pytree.tree_leaves(inputs))
    kept = [(tensor, tensor.detach().clone()) for tensor in _tensors(found)]
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                if not torch.equal(tensor, value):  # running statistics have no new version
                    tensor.copy_(value)


def _tensors(found: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that may be written to: each once, none whose elements overlap."""
    unique = {id(t): t for t in found if isinstance(t, torch.Tensor) and _is_plain(t)}
    return list(unique.values())


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return all(size < 2 or stride != 0 for size, stride in axes)
