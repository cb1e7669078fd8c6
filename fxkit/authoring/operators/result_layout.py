"""How results of an operator lie in memory: as those of torch's own operators do.

Said here without running one of them: on tensors without numbers torch does so in Python, and loads
much to do it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def broadcast_shape(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return what the shapes of tensors broadcast to.

    Raises:
        RuntimeError: When they do not.
    """
    found = [1] * max(t.ndim for t in tensors)
    for tensor in tensors:
        lead = len(found) - tensor.ndim
        for axis, size in enumerate(tensor.shape, lead):
            if size != 1 != found[axis] != size:
                raise RuntimeError(
                    f"expected shapes that broadcast, got {[tuple(t.shape) for t in tensors]}"
                )
            found[axis] = found[axis] if size == 1 else size
    return tuple(found)


def result_strides(shape: Sequence[int], tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the strides of what a pointwise operator of torch makes of tensors.

    Source: `TensorIteratorBase::compute_fast_setup_type` and `reorder_dimensions` of ATen.

    Args:
        shape: What the tensors broadcast to.
        tensors: The operands.
    """
    if all(t.shape == tuple(shape) for t in tensors) and (kept := _common(tensors)) is not None:
        return kept
    rank = len(shape)
    operands = [_broadcast_strides(shape, t) for t in tensors]
    order = list(range(rank))[::-1]  # innermost first
    for last in range(1, rank):
        place = last
        for before in range(last)[::-1]:
            answer = _compared(order[before], order[place], operands, shape)
            if answer < 0:
                break
            if answer:
                order[before], order[place] = order[place], order[before]
                place = before
    return _dense(shape, order)


def _common(tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """Return strides that results share with operands of one shape; None if none suit all."""
    first = tensors[0]
    if all(t.is_contiguous() for t in tensors):
        return _dense(first.shape, range(first.ndim)[::-1])
    if first.ndim == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors):
        return _dense(first.shape, (1, 3, 2, 0))
    is_same = all(t.stride() == first.stride() for t in tensors)
    return tuple(first.stride()) if is_same and _is_dense(first) else None


def _is_dense(tensor: torch.Tensor) -> bool:
    sizes = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in sizes:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _broadcast_strides(shape: Sequence[int], tensor: torch.Tensor) -> list[int]:
    lead = len(shape) - tensor.ndim
    own = zip(shape[lead:], tensor.shape, tensor.stride(), strict=True)
    return [0] * lead + [0 if size == 1 != whole else stride for whole, size, stride in own]


def _compared(a: int, b: int, operands: list[list[int]], shape: Sequence[int]) -> int:
    """Return 1 where axis `b` is to lie inside of axis `a`, -1 where not, 0 where none says."""
    for strides in operands:
        if not strides[a] or not strides[b]:
            continue
        if strides[a] != strides[b]:
            return 1 if strides[a] > strides[b] else -1
        if shape[a] > shape[b]:
            return 1
    return 0


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return strides without gaps.

    Args:
        shape: The sizes.
        order: The axes, innermost first.
    """
    return tuple(
        math.prod(max(shape[inner], 1) for inner in order[: order.index(axis)])
        for axis in range(len(shape))
    )
