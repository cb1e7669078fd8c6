"""Give a value the strides that another has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, contiguous_stride, type_of

_aten = torch.ops.aten


def has_layout(known: TensorType, wanted: TensorType) -> bool:
    """Tell whether a value lies in memory as wanted; axes of length one don't matter."""
    if known.stride is None or wanted.stride is None or known.stride == wanted.stride:
        return True
    if math.prod(known.shape) == 0:
        return True
    axes = zip(known.shape, known.stride, wanted.stride, strict=True)
    return all(size == 1 or have == want for size, have, want in axes)


def laid_out_as(
    edit: EditSession,
    node: fx.Node,
    wanted: TensorType,
    before: fx.Node,
    *,
    is_exact: bool = False,
) -> fx.Node | None:
    """Return a copy of a value in another layout; itself when it has that; None if it can't be.

    Args:
        edit: The session.
        node: The value, of known type.
        wanted: A type of the same shape; its strides are meant.
        before: Where to insert the copy.
        is_exact: Whether the strides of axes of length one matter, as they do to who asks for them.
    """
    known = type_of(node)
    if not isinstance(known, TensorType) or known.shape != wanted.shape:
        return None
    if known.stride == wanted.stride if is_exact else has_layout(known, wanted):
        return node
    order = _axes_outermost_first(wanted)
    if order is None:
        return None
    options = {"memory_format": torch.contiguous_format}
    if order == list(range(len(order))):
        return _call(edit, before, _aten.clone.default, node, **options)
    turned = _call(edit, before, _aten.permute.default, node, order)
    dense = _call(edit, before, _aten.clone.default, turned, **options)
    back = sorted(range(len(order)), key=order.__getitem__)
    return _call(edit, before, _aten.permute.default, dense, back)


def _axes_outermost_first(wanted: TensorType) -> list[int] | None:
    """Return the order of the axes in memory, or None when there are gaps or overlaps."""
    stride = wanted.stride or ()
    if any(not isinstance(s, int) for s in (*stride, *wanted.shape)):
        return None
    order = sorted(range(len(stride)), key=lambda axis: (-stride[axis], axis))
    shape = tuple(wanted.shape[axis] for axis in order)
    dense = contiguous_stride(shape)
    fits = all(
        size == 1 or stride[axis] == step
        for axis, size, step in zip(order, shape, dense, strict=True)
    )
    return order if fits else None


def _call(edit: EditSession, before: fx.Node, overload: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = edit.call(overload, *args, before=before, **kwargs)
    infer_type(node)
    return node
