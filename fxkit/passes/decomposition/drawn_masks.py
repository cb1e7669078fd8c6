"""Masks that are drawn without writing, with the same numbers as where they are written in place.

`x.bernoulli_(p)` follows the elements of `x` as they lie in memory, or, with the library that torch
uses on some processors, the order of the axes. `bernoulli.p` makes a result that lies in the order
of the axes, whatever `x` is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxkit.torch_adapters.modes import without_dispatch_modes

_aten = torch.ops.aten

Emit = Callable[..., Any]
"""Calls an overload, or writes the call into a graph."""


def memory_order(shape: Sequence[Any], stride: Sequence[Any] | None) -> list[int] | None:
    """Return the axes from the outermost in memory to the innermost; None where not needed.

    It is not needed for what lies in the order of the axes, and not known for what has gaps or
    overlaps, or sizes that are expressions.
    """
    if stride is None or any(not isinstance(size, int) for size in (*shape, *stride)):
        return None
    order = sorted(range(len(shape)), key=lambda axis: (-stride[axis], axis))
    step = 1
    for axis in reversed(order):
        if shape[axis] != 1 and stride[axis] != step:
            return None
        step *= shape[axis]
    moved = [axis for axis in order if shape[axis] != 1]
    return None if moved == sorted(moved) else order


def drawn_mask(emit: Emit, like: Any, p: float, order: list[int] | None, **options: Any) -> Any:
    """Draw a mask as `like.bernoulli_(p)` draws it.

    Args:
        emit: Calls an overload.
        like: What tells shape and dtype.
        p: How often an element is one.
        order: What `memory_order` says of `like`.
        **options: The generator.

    Returns:
        The mask, which lies in memory as `like` does where that is known.
    """
    if order is None:
        return emit(_aten.bernoulli.p, like, p, **options)
    if draws_as_memory_lies():
        mask = emit(_aten.bernoulli.p, emit(_aten.permute.default, like, order), p, **options)
    else:
        mask = emit(_aten.bernoulli.p, like, p, **options)
        turned = emit(_aten.permute.default, mask, order)
        mask = emit(_aten.clone.default, turned, memory_format=torch.contiguous_format)
    back = sorted(range(len(order)), key=order.__getitem__)
    return emit(_aten.permute.default, mask, back)


@functools.cache
def draws_as_memory_lies() -> bool:
    """Tell whether torch follows the memory here, and not the axes. Draws from no shared stream."""

    with without_dispatch_modes():
        dense, turned = torch.empty(64, 2), torch.empty(64, 2).t()
        dense.bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
        turned.bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
        return torch.equal(turned.t(), dense)
