"""Gathers: rows that read at places that other tensors say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxkit.ir.types import broadcast_shape
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.index import Index
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.movement_table import Point, move, replaced
from fxkit.lower.operators.scalar_table import select


def checked(p: Point, value: Ref, size: int, wraps: bool = False) -> Index:
    """Return an integer value as an index within a size, or leave the call to eager's error."""
    if value.is_float or value.dtype == torch.bool:
        raise Unfusable("indices of other than integers are left to eager")
    value = value.cast(torch.int64)
    if wraps:
        p.require((value >= -size) & (value < size))
        return p.place(select(value < 0, value + size, value))
    p.require((value >= 0) & (value < size))
    return p.place(value)


@move("aten.embedding", checks=True)
def _embedding(p: Point, weight: Any, indices: Any) -> Ref:
    place = checked(p, p.read_own(indices, p.index[:-1]), p.shape_of(weight)[0])
    return p.read(weight, (place, p.index[-1]))


@move("aten.index_select", checks=True)
def _index_select(p: Point, self: Any, index: Any, *, dim: int) -> Ref:
    shape = p.shape_of(self)
    if not shape:
        raise Unfusable("a selection from a tensor without dimensions is left to eager")
    d = dim % len(shape)
    where = [p.index[d]] if p.shape_of(index) else []
    return p.read(self, replaced(p.index, d, checked(p, p.read_own(index, where), shape[d])))


@move("aten.gather", checks=True)
def _gather(p: Point, self: Any, index: Any, *, dim: int) -> Ref:
    shape = p.shape_of(self)
    if not shape or len(p.shape_of(index)) != len(shape):
        raise Unfusable("a gather from a tensor without dimensions is left to eager")
    d = dim % len(shape)
    return p.read(self, replaced(p.index, d, checked(p, p.read_own(index, p.index), shape[d])))


@move("aten.take_along_dim", checks=True)
def _take_along_dim(p: Point, self: Any, indices: Any, *, dim: int | None = None) -> Ref:
    shape = p.shape_of(self)
    if dim is None:
        number = checked(p, p.read_own(indices, _elements(p, indices)), _count(shape), wraps=True)
        return _at_number(p, self, number)
    d = dim % len(shape)
    value = p.read_own(indices, _aligned(p, indices))
    place = checked(p, value, shape[d], wraps=True)
    index = [i if size > 1 else Index() for i, size in zip(p.index, shape, strict=True)]
    return p.read(self, replaced(index, d, place))


def _elements(p: Point, indices: Any) -> tuple[Index, ...]:
    """Return the index into a tensor that is read as if it were flat."""
    return p.numbered(p.index[0], p.shape_of(indices))


def _aligned(p: Point, operand: Any) -> list[Index]:
    """Return the index into an operand that broadcasts to the result."""
    shape = p.shape_of(operand)
    index = p.index[len(p.index) - len(shape) :]
    return [i if size > 1 else Index() for i, size in zip(index, shape, strict=True)]


@move("aten.take", checks=True)
def _take(p: Point, self: Any, index: Any) -> Ref:
    number = checked(p, p.read_own(index, p.index), _count(p.shape_of(self)), wraps=True)
    return _at_number(p, self, number)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _at_number(p: Point, self: Any, number: Index) -> Ref:
    """Read the element that has a number, counted row by row."""
    shape = p.shape_of(self)
    rest = p.value(number)
    index: list[Index] = []
    for size in reversed(shape[1:]):
        index.append(p.place(rest.builder.scalar("mod", rest, size)))
        rest = rest / size
    index += [p.place(rest)] if shape else []
    return p.read(self, index[::-1])


@move("aten.index", "aten._unsafe_index", checks=True)
def _index(p: Point, self: Any, indices: Sequence[Any]) -> Ref:
    return _at_tensors(p, p.shape_of(self), [*indices], lambda index: p.read(self, index))


def _at_tensors(
    p: Point,
    shape: tuple[int, ...],
    indices: list[Any],
    read: Callable[[Sequence[Index]], Ref],
) -> Ref:
    """Read where integer tensors say, one for each dimension that is not walked whole (None)."""
    indices = indices + [None] * (len(shape) - len(indices))
    given = [d for d, one in enumerate(indices) if one is not None]
    shapes = [p.shape_of(indices[d]) for d in given]
    joint = broadcast_shape(*shapes)
    is_run = given == list(range(given[0], given[-1] + 1))
    begin = given[0] if is_run else 0
    walked = [*p.index[:begin], *p.index[begin + len(joint) :]]
    point = p.index[begin : begin + len(joint)]

    def place(d: int) -> Index:
        own = p.shape_of(indices[d])
        index = point[len(point) - len(own) :]
        at = [i if size > 1 else Index() for i, size in zip(index, own, strict=True)]
        return checked(p, p.read_own(indices[d], at), shape[d], wraps=True)

    whole = iter(walked)
    return read([place(d) if d in given else next(whole) for d in range(len(shape))])


@move("python.getitem", checks=True)
def _getitem(p: Point, self: Any, key: Any) -> Ref:
    keys = list(key) if isinstance(key, tuple) else [key]
    if not all(p.is_tensor(k) or k is None or k is Ellipsis or _is_part(k) for k in keys):
        raise Unfusable("a key of other than integers, parts and tensors is left to eager")
    shape = p.shape_of(self)
    walked = sum(k is not None and k is not Ellipsis for k in keys)
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (len(shape) - walked)
    sizes = _shown_sizes(p, keys, shape)
    tensors = [k if p.is_tensor(k) else None for k in keys if type(k) is not int]
    return _at_tensors(
        p, sizes, tensors, lambda index: p.read(self, _shown_index(p, keys, shape, index))
    )


def _is_part(key: Any) -> bool:
    ends = (key.start, key.stop, key.step) if isinstance(key, slice) else (key,)
    return all(e is None or type(e) is int for e in ends)


def _shown_sizes(p: Point, keys: list[Any], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of what the integers and parts of a key show."""
    sizes = iter(shape)
    result: list[int] = []
    for key in keys:
        size = 1 if key is None else next(sizes)
        if isinstance(key, slice):
            size = len(range(*key.indices(size)))
        if type(key) is not int:
            result.append(size)
    return tuple(result)


def _shown_index(
    p: Point, keys: list[Any], shape: Sequence[int], index: Sequence[Index]
) -> list[Index]:
    """Return the index into a tensor for an index into what a key shows of it."""
    sizes, places = iter(shape), iter(index)
    result: list[Index] = []
    for key in keys:
        place = Index() if type(key) is int else next(places)
        if key is None:
            continue
        size = next(sizes)
        if type(key) is int:
            result.append(Index(offset=key % size))
        elif isinstance(key, slice):
            start, _, step = key.indices(size)
            result.append(place * step + start)
        else:
            result.append(place)
    return result
