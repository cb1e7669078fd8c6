"""What a view shows of its operand, as torch itself says.

A view is run on a tensor without memory whose strides number its elements row by row. The result's
strides and offset then say which number each of its elements has: all there is to know of a view,
whatever the operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.loop_ir.index import Index, numbered, row_major
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.torch_adapters.tensors import base_of_view

# They return their operand as it is, or views of some or all of its elements, one or several.
_VIEWS = frozenset(
    """aten.alias aten.detach aten.positive aten.contiguous aten.expand aten.expand_as
    aten.unsqueeze aten.squeeze aten.transpose aten.t aten.permute aten.view aten.reshape
    aten.view_as aten.mT aten.dropout aten._unsafe_view aten.flatten aten.unflatten aten.ravel
    aten.movedim aten.moveaxis aten.swapaxes aten.swapdims aten.numpy_T aten.adjoint aten.slice
    aten.select aten.narrow aten.chunk aten.split aten.split_with_sizes aten.unbind
    aten.tensor_split aten.hsplit aten.vsplit aten.dsplit aten.diagonal aten.unfold
    aten.atleast_1d aten.atleast_2d aten.atleast_3d python.identity python.getitem""".split()
)

_SAME = frozenset(
    """aten.alias aten.detach aten.positive aten.contiguous aten.dropout python.identity aten.to
    aten.type_as""".split()
)


@dataclass(frozen=True)
class ViewMap:
    """Which element of its operand each element of a view is.

    Attributes:
        source: The operand.
        shape: The operand's shape.
        sizes: The view's shape.
        strides: What a step along each dimension of the view adds to the number of the element.
        offset: Number of the view's first element.
    """

    source: fx.Node
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def index(self, index: Sequence[Index], sizes: Sequence[int]) -> tuple[Index, ...]:
        """Return the operand's index for an index of the view.

        Raises:
            SplitAxis: See `Index.divided`.
            Unfusable: See `Index.divided`.
        """
        return viewed(index, self.sizes, self.strides, self.offset, self.shape, sizes)


def viewed(
    index: Sequence[Index],
    extent: Sequence[int],
    strides: Sequence[int],
    offset: int,
    shape: Sequence[int],
    sizes: Sequence[int],
) -> tuple[Index, ...]:
    """Return the operand's index for an index of a view.

    Args:
        index: Index into the view.
        extent: Shape of the view.
        strides: What a step along each of its dimensions adds to the number of the element.
        offset: Number of its first element.
        shape: Shape of the operand.
        sizes: Sizes of the loop axes.
    """
    apart = _by_dimension(index, extent, strides, offset, shape)
    if apart is not None:
        return apart
    number = Index(offset=offset)
    for one, stride in zip(index, strides, strict=True):
        number = number + one * stride
    return numbered(number, shape, sizes)


def _by_dimension(
    index: Sequence[Index],
    extent: Sequence[int],
    strides: Sequence[int],
    offset: int,
    shape: Sequence[int],
) -> tuple[Index, ...] | None:
    """Return the operand's index where each dimension of the view runs along one of the operand's.

    What lies outside of the view, as where a guard does not hold, then lies somewhere along the
    same dimension, so that nothing has to be known of where the index is.
    """
    numbers = (*extent, *strides, offset, *shape)
    if not all(type(number) is int for number in numbers) or 0 in (*extent, *shape):
        return None
    below = row_major(shape)
    result, last = [], []
    for step in below:
        result.append(Index(offset=offset // step))
        last.append(offset // step)
        offset %= step
    for one, size, stride in zip(index, extent, strides, strict=True):
        if size == 1 or stride == 0:
            continue
        d = next((d for d, step in enumerate(below) if shape[d] > 1 and stride % step == 0), None)
        if d is None:
            return None
        result[d] += one * (stride // below[d])
        last[d] += (size - 1) * (stride // below[d])
    return tuple(result) if all(a < b for a, b in zip(last, shape, strict=True)) else None


def is_alias(node: fx.Node) -> bool:
    """Tell whether a node returns its operand, views of it, or one of several results."""
    call = resolve(node)
    if call is None or len(node.all_input_nodes) != 1:
        return False
    result = type_of(node)
    source = alias_source(call)
    operand = type_of(source) if source is not None else None
    name = call.name
    if name == "python.getitem" and isinstance(operand, tuple):
        return isinstance(result, TensorType) and isinstance(call.arguments.get("1"), int)
    parts = result if isinstance(result, tuple) else (result,)
    if not isinstance(operand, TensorType):
        return False
    if not all(isinstance(p, TensorType) and p.dtype == operand.dtype for p in parts):
        return False
    if name == "python.getitem":
        return _is_plain(call.arguments.get("1"))
    if name == "aten.dropout":
        return call.arguments.get("train") is False
    if name in ("aten.to", "aten.type_as"):
        return operand == result and not call.arguments.get("copy")
    return name in _VIEWS


def _is_plain(key: Any) -> bool:
    """Tell whether a key takes a view."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(
        type(k) is int
        or k is None
        or k is Ellipsis
        or (isinstance(k, slice) and all(type(e) in (int, type(None)) for e in _ends(k)))
        for k in keys
    )


def _ends(key: slice) -> tuple[Any, Any, Any]:
    return key.start, key.stop, key.step


def alias_source(call: Call) -> fx.Node | None:
    """Return the operand of a view."""
    for name in ("self", "input", "tensor", "0"):
        value = call.arguments.get(name)
        if isinstance(value, fx.Node):
            return value
    return None


def shown_by(node: fx.Node) -> fx.Node:
    """Return what a node shows, itself or that which it is a view of."""
    while is_alias(node):
        call = resolve(node)
        source = alias_source(call) if call else None
        if source is None:
            break
        node = source
    return node


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node, and the views of it and of these."""
    yield node
    for user in node.users:
        if is_alias(user):
            yield from views_of(user)


def view_map(node: fx.Node) -> ViewMap:
    """Return what a view shows; one of several views by the call that takes it.

    Raises:
        Unfusable: When it is no view that torch can follow.
    """
    call = resolve(node)
    source = alias_source(call) if call else None
    if call is None or source is None:
        raise Unfusable("it is no view")
    part: int | None = None
    if call.name == "python.getitem" and isinstance(type_of(source), tuple):
        part, node = call.arguments["1"], source
        call = resolve(source)
        source = alias_source(call) if call else None
        if call is None or source is None or not is_alias(node):
            raise Unfusable("it takes one of several results that are no views")
    shape = tuple(type_of(source).shape)
    meta_operand = torch.empty(shape, device="meta")
    result = meta_operand if call.name in _SAME else _run(node, source, meta_operand)
    result = result if part is None else result[part]
    strides, offset = shown(meta_operand, result)
    return ViewMap(source, shape, tuple(result.shape), strides, offset)


def shown(meta_operand: torch.Tensor, result: Any) -> tuple[tuple[int, ...], int]:
    """Return the strides and the offset of a view of a tensor without memory.

    Raises:
        Unfusable: When it is no view.
    """
    if not isinstance(result, torch.Tensor) or (
        result is not meta_operand and base_of_view(result) is not meta_operand
    ):
        raise Unfusable("it copies what a view would show")
    return tuple(result.stride()), int(result.storage_offset())


def _run(node: fx.Node, source: fx.Node, meta_operand: torch.Tensor) -> Any:
    """Run a node on another operand."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: meta_operand)
    with torch.no_grad():
        if node.op == "call_method":
            operand, *rest = args
            return getattr(operand, str(node.target))(*rest, **kwargs)
        if node.target is torch.ops.aten._unsafe_view.default:  # a view that says that it is none
            return torch.ops.aten.view.default(*args, **kwargs)
        if callable(node.target):
            return node.target(*args, **kwargs)
    raise Unfusable("it is no function")
