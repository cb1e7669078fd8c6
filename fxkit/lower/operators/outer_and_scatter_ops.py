"""Products and differences of elements at different places, and gates that join two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.index import Index
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.joining_ops import joined, pieces
from fxkit.lower.operators.movement_table import Point, move, replaced
from fxkit.lower.operators.scalar_table import call, select


def _times(a: Ref, b: Ref) -> Ref:
    return a & b if a.dtype == torch.bool else a * b


def _rounds_once(p: Point) -> None:
    """Refuse dtypes that eager rounds to after each step."""
    if p.dtype in (torch.bfloat16, torch.float16):
        raise Unfusable("eager rounds it to 16 bits several times")


@move("aten.outer", "aten.ger")
def _outer(p: Point, self: Any, vec2: Any) -> Ref:
    return _times(p.read(self, p.index[:1]), p.read(vec2, p.index[1:]))


@move("aten.addr", tolerance=4)
def _addr(p: Point, self: Any, vec1: Any, vec2: Any, *, beta: Number = 1, alpha: Number = 1) -> Ref:
    _rounds_once(p)
    if p.dtype == torch.bool or not beta:
        raise Unfusable("an update of bools, or one that drops its operand, is left to eager")
    shape = p.shape_of(self)
    own = p.index[2 - len(shape) :]
    base = p.read(self, [i if n > 1 else Index() for i, n in zip(own, shape, strict=True)])
    product = p.read(vec1, p.index[:1]) * alpha * p.read(vec2, p.index[1:])
    return base * beta + product


@move("aten.kron")
def _kron(p: Point, self: Any, other: Any) -> Ref:
    def read(operand: Any, part: int) -> Ref:
        shape = p.shape_of(operand)
        other_shape = p.shape_of(other)
        sizes = (1,) * (len(p.index) - len(other_shape)) + tuple(other_shape)
        places = [p.divided(i, size)[part] for i, size in zip(p.index, sizes, strict=True)]
        return p.read(operand, places[len(places) - len(shape) :])

    return _times(read(self, 0), read(other, 1))


@move("aten.cross", tolerance=4)
def _cross(p: Point, self: Any, other: Any, *, dim: int | None = None) -> Ref:
    if dim is None:
        dim = next(d for d, size in enumerate(p.shape) if size == 3)
    return _crossed(p, self, other, dim % len(p.shape))


@move("aten.linalg_cross", tolerance=4)
def _linalg_cross(p: Point, self: Any, other: Any, *, dim: int = -1) -> Ref:
    return _crossed(p, self, other, dim % len(p.shape))


def _crossed(p: Point, self: Any, other: Any, d: int) -> Ref:
    _rounds_once(p)

    def read(operand: Any, ahead: int) -> Ref:
        shape = p.shape_of(operand)

        def at(place: Index) -> Ref:
            index = replaced(p.index, d, place)
            both = zip(index, shape, strict=True)
            return p.read(operand, [i if size > 1 else Index() for i, size in both])

        parts = [(3 - ahead, lambda i: at(i + ahead)), (ahead, at)]
        return pieces(p, p.index[d], parts)

    return read(self, 1) * read(other, 2) - read(self, 2) * read(other, 1)


@move("aten.diff")
def _diff(
    p: Point, self: Any, prepend: Any = None, append: Any = None, *, n: int = 1, dim: int = -1
) -> Ref:
    if n != 1:
        raise Unfusable("differences of differences are left to eager")
    d = dim % len(p.shape)
    tensors = [t for t in (prepend, self, append) if t is not None]

    here, ahead = joined(p, tensors, d), joined(p, tensors, d, ahead=1)
    return ahead ^ here if p.dtype == torch.bool else ahead - here


@move("aten.glu", tolerance=4)
def _glu(p: Point, self: Any, *, dim: int = -1) -> Ref:
    d = dim % len(p.shape)
    gate = p.read(self, replaced(p.index, d, p.index[d] + p.shape[d]))
    return p.read(self, p.index) * call("sigmoid", gate)


@move("aten.prelu", "aten._prelu_kernel")
def _prelu(p: Point, self: Any, weight: Any) -> Ref:
    shape = p.shape_of(weight)
    if len(shape) > 1:
        index = [i if size > 1 else Index() for i, size in zip(p.index, shape, strict=True)]
    elif shape and shape[0] > 1:
        index = [p.index[1]]
    else:
        index = [Index()] * len(shape)
    x = p.read(self, p.index)
    return select(x > 0, x, p.read(weight, index) * x)


# --- one operand with a part of it replaced


@move("aten.select_scatter")
def _select_scatter(p: Point, self: Any, src: Any, *, dim: int, index: int) -> Ref:
    d = dim % len(p.shape)
    rest = p.index[:d] + p.index[d + 1 :]
    return _patched(p, self, lambda place: p.read(src, rest), d, index % p.shape[d], 1)


@move("aten.slice_scatter")
def _slice_scatter(
    p: Point,
    self: Any,
    src: Any,
    *,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Ref:
    if step != 1:
        raise Unfusable("every second element, or fewer, is replaced by eager")
    d = dim % len(p.shape)
    first, last, _ = slice(start, end).indices(p.shape[d])

    def read(place: Index) -> Ref:
        return p.read(src, replaced(p.index, d, place))

    return _patched(p, self, read, d, first, max(0, last - first))


def _patched(
    p: Point, self: Any, read: Callable[[Index], Ref], d: int, first: int, count: int
) -> Ref:
    """Read from one operand within a range of a dimension, else from another."""

    def own(offset: int) -> Callable[[Index], Ref]:
        return lambda place: p.read(self, replaced(p.index, d, place + offset))

    after = first + count
    parts = [(first, own(0)), (count, read), (p.shape[d] - after, own(after))]
    return pieces(p, p.index[d], [part for part in parts if part[0]])


@move("aten.diagonal_scatter")
def _diagonal_scatter(
    p: Point, self: Any, src: Any, *, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Ref:
    rank = len(p.shape)
    rows, columns = dim1 % rank, dim2 % rank
    lead = [i for d, i in enumerate(p.index) if d not in (rows, columns)]
    apart = p.index[columns] + p.index[rows] * -1 - offset
    own = lambda: p.read(self, p.index)  # noqa: E731
    place = p.index[rows] + min(0, offset)
    other = lambda: p.read(src, (*lead, place))  # noqa: E731
    return p.where(p.below(apart, 0), own, lambda: p.where(p.below(apart, 1), other, own))


@move("aten.cartesian_prod")
def _cartesian_prod(p: Point, tensors: Sequence[Any]) -> Ref:
    sizes = [p.shape_of(t)[0] for t in tensors]
    if len(tensors) == 1:
        return p.read(tensors[0], p.index)

    def column(k: int) -> Callable[[Index], Ref]:
        def read(place: Index) -> Ref:
            below = 1
            for size in sizes[k + 1 :]:
                below *= size
            number = p.divided(p.index[0], below)[0]
            return p.read(tensors[k], [p.divided(number, sizes[k])[1]])

        return read

    return pieces(p, p.index[1], [(1, column(k)) for k in range(len(tensors))])


@move("torch.nn.functional.unfold", "aten.im2col")
def _unfold(
    p: Point,
    input: Any,
    *,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Ref:
    shape = p.shape_of(input)
    kernel, dilated, padded, strided = (
        (v, v) if isinstance(v, int) else tuple(v) for v in (kernel_size, dilation, padding, stride)
    )
    *lead, channel, place = p.index
    width = (shape[-1] + 2 * padded[1] - dilated[1] * (kernel[1] - 1) - 1) // strided[1] + 1
    channel, within = p.divided(channel, kernel[0] * kernel[1])
    offsets, places = p.divided(within, kernel[1]), p.divided(place, width)
    index = [
        at * step + offset * apart - before
        for at, offset, step, apart, before in zip(
            places, offsets, strided, dilated, padded, strict=True
        )
    ]
    zero = lambda: p.number(0)  # noqa: E731

    def inside(d: int) -> Ref:
        if d == 2:
            return p.read(input, (*lead, channel, *index))
        size = shape[len(shape) - 2 + d]
        return p.where(
            p.below(index[d], 0),
            zero,
            lambda: p.where(p.below(index[d], size), lambda: inside(d + 1), zero),
        )

    return inside(0)
