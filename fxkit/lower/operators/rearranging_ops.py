"""Flips, rolls, repetitions and triangles, and tensors that are made from their places alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.index import Index
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.joining_ops import pieces
from fxkit.lower.operators.movement_table import Point, move, replaced
from fxkit.lower.operators.scalar_table import select


def _several(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


@move("aten.flip")
def _flip(p: Point, self: Any, *, dims: Sequence[int]) -> Ref:
    return _flipped(p, self, _several(dims))


@move("aten.fliplr")
def _fliplr(p: Point, self: Any) -> Ref:
    return _flipped(p, self, [1])


@move("aten.flipud")
def _flipud(p: Point, self: Any) -> Ref:
    return _flipped(p, self, [0])


def _flipped(p: Point, self: Any, dims: Sequence[int]) -> Ref:
    index = list(p.index)
    for d in dims if index else ():
        index[d] = (p.shape[d] - 1) - index[d]
    return p.read(self, index)


@move("aten.rot90")
def _rot90(p: Point, self: Any, *, k: int = 1, dims: Sequence[int] = (0, 1)) -> Ref:
    a, b = (d % len(p.shape) for d in dims)
    index = list(p.index)
    first, second = index[a], index[b]
    last_first, last_second = p.shape[a] - 1, p.shape[b] - 1
    turned = {
        0: (first, second),
        1: (second, last_first - first),
        2: (last_first - first, last_second - second),
        3: (last_second - second, first),
    }
    index[a], index[b] = turned[k % 4]
    return p.read(self, index)


@move("aten.roll")
def _roll(p: Point, self: Any, *, shifts: Sequence[int], dims: Sequence[int] = ()) -> Ref:
    shape = p.shape
    by, along = _several(shifts), _several(dims)
    if not along:
        raise Unfusable("a roll of all elements as one row is left to eager")
    total = [0] * len(shape)
    for d, shift in zip(along, by, strict=True):
        total[d] += shift

    def read(d: int, index: tuple[Index, ...]) -> Ref:
        if d == len(shape):
            return p.read(self, index)
        shift = total[d] % shape[d]
        if not shift:
            return read(d + 1, index)
        parts = [
            (shift, lambda i: read(d + 1, replaced(index, d, i + (shape[d] - shift)))),
            (shape[d] - shift, lambda i: read(d + 1, replaced(index, d, i))),
        ]
        return pieces(p, index[d], parts)

    return read(0, p.index)


@move("aten.repeat")
def _repeat(p: Point, self: Any, *, repeats: Sequence[int]) -> Ref:
    return _repeated(p, self)


@move("aten.tile")
def _tile(p: Point, self: Any, *, dims: Sequence[int]) -> Ref:
    return _repeated(p, self)


def _repeated(p: Point, self: Any) -> Ref:
    shape = p.shape_of(self)
    index = p.index[len(p.index) - len(shape) :]
    return p.read(self, [p.divided(i, size)[1] for i, size in zip(index, shape, strict=True)])


@move("aten.repeat_interleave")
def _repeat_interleave(p: Point, self: Any, *, repeats: int, dim: int | None = None) -> Ref:
    if type(repeats) is not int:
        raise Unfusable("repetitions that a tensor counts are left to eager")
    shape = p.shape_of(self)
    if dim is None:
        return p.read(self, p.numbered(p.divided(p.index[0], repeats)[0], shape))
    d = dim % len(shape)
    return p.read(self, replaced(p.index, d, p.divided(p.index[d], repeats)[0]))


@move("aten.pixel_shuffle")
def _pixel_shuffle(p: Point, self: Any, *, upscale_factor: int) -> Ref:
    *lead, c, h, w = p.index
    r = upscale_factor
    (h, dh), (w, dw) = p.divided(h, r), p.divided(w, r)
    return p.read(self, (*lead, c * (r * r) + dh * r + dw, h, w))


@move("aten.pixel_unshuffle")
def _pixel_unshuffle(p: Point, self: Any, *, downscale_factor: int) -> Ref:
    *lead, c, h, w = p.index
    r = downscale_factor
    c, rest = p.divided(c, r * r)
    dh, dw = p.divided(rest, r)
    return p.read(self, (*lead, c, h * r + dh, w * r + dw))


@move("aten.channel_shuffle", "aten.native_channel_shuffle", in_order=True)
def _channel_shuffle(p: Point, self: Any, *, groups: int) -> Ref:
    each = p.shape[1] // groups
    place, group = p.divided(p.index[1], groups)
    return p.read(self, replaced(p.index, 1, group * each + place))


# --- triangles


@move("aten.tril")
def _tril(p: Point, self: Any, *, diagonal: int = 0) -> Ref:
    return p.where(_is_above(p, diagonal), lambda: p.number(0), lambda: p.read(self, p.index))


@move("aten.triu")
def _triu(p: Point, self: Any, *, diagonal: int = 0) -> Ref:
    return p.where(_is_above(p, diagonal - 1), lambda: p.read(self, p.index), lambda: p.number(0))


def _is_above(p: Point, diagonal: int) -> Ref | bool:
    """Tell whether the column is behind the row by more than a number."""
    return p.below(p.index[-2] + p.index[-1] * -1 + diagonal, 0)


@move("aten.diag_embed")
def _diag_embed(p: Point, self: Any, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Ref:
    rank = len(p.shape)
    rows, columns = dim1 % rank, dim2 % rank
    return _on_diagonal(p, self, offset, rows, columns)


@move("aten.diag")
def _diag(p: Point, self: Any, *, diagonal: int = 0) -> Ref:
    if len(p.shape) == 2:
        return _on_diagonal(p, self, diagonal, 0, 1)
    (place,) = p.index
    return p.read(self, (place + max(0, -diagonal), place + max(0, diagonal)))


def _on_diagonal(p: Point, self: Any, offset: int, rows: int, columns: int) -> Ref:
    """Read where the column is `offset` behind the row; elsewhere it is zero."""
    lead = [i for d, i in enumerate(p.index) if d not in (rows, columns)]
    apart = p.index[columns] + p.index[rows] * -1 - offset
    place = p.index[rows] + min(0, offset)
    inside = lambda: p.read(self, (*lead, place))  # noqa: E731
    zero = lambda: p.number(0)  # noqa: E731
    return p.where(p.below(apart, 0), zero, lambda: p.where(p.below(apart, 1), inside, zero))


# --- made from places


@move("aten.new_full")
def _new_full(p: Point, self: Any, *, fill_value: Number) -> Ref:
    return p.number(fill_value)


@move("aten.new_zeros")
def _new_zeros(p: Point, self: Any) -> Ref:
    return p.number(0)


@move("aten.new_ones")
def _new_ones(p: Point, self: Any) -> Ref:
    return p.number(1)


@move("aten.full")
def _full(p: Point, *, fill_value: Number) -> Ref:
    return p.number(fill_value)


@move("aten.zeros")
def _zeros(p: Point) -> Ref:
    return p.number(0)


@move("aten.ones")
def _ones(p: Point) -> Ref:
    return p.number(1)


@move("aten.scalar_tensor")
def _scalar_tensor(p: Point, *, s: Number) -> Ref:
    return p.number(s)


@move("aten.eye")
def _eye(p: Point) -> Ref:
    apart = p.value(p.index[0] + p.index[1] * -1)
    return select(apart.equals(0), p.number(1), p.number(0))


@move("aten.arange")
def _arange(p: Point, *, start: Number = 0, step: Number = 1) -> Ref:
    if p.dtype.is_floating_point and not (_is_whole(start) and _is_whole(step)):
        raise Unfusable("a range of fractions is left to eager")
    return p.value(p.index[0] * int(step) + int(start)).cast(p.dtype)


def _is_whole(value: Number) -> bool:
    return float(value).is_integer() and abs(value) < 2**31


@move("aten.one_hot", checks=True)
def _one_hot(p: Point, self: Any, *, num_classes: int = -1) -> Ref:
    if num_classes < 0:
        raise Unfusable("the number of classes is in the data")
    label = p.read_own(self, p.index[:-1])
    if label.dtype != torch.int64:
        raise Unfusable("labels of other than int64 are left to eager, which raises")
    p.require((label >= 0) & (label < num_classes))
    return select(label.equals(p.value(p.index[-1])), p.number(1), p.number(0))
