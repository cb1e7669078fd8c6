"""Concatenating, stacking and padding: rows that choose by guards what is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.index import Index
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.movement_table import Point, move, replaced


def pieces(p: Point, along: Index, parts: Sequence[tuple[int, Callable[[Index], Ref]]]) -> Ref:
    """Read the part that an index falls into.

    Args:
        p: The point.
        along: The index.
        parts: Sizes of the parts, one after the other, and how to read at a place within each.
    """
    (size, read), *others = parts
    if not others:
        return read(along)
    return p.where(
        p.below(along, size), lambda: read(along), lambda: pieces(p, along - size, others)
    )


def joined(p: Point, tensors: Sequence[Any], d: int, ahead: int = 0) -> Ref:
    """Read from tensors that lie one after the other along a dimension, some places ahead."""

    def reader(tensor: Any) -> Callable[[Index], Ref]:
        return lambda place: p.read(tensor, replaced(p.index, d, place))

    parts = [(p.shape_of(t)[d], reader(t)) for t in tensors if _counts(p, t)]
    return pieces(p, p.index[d] + ahead, [part for part in parts if part[0]])


def _counts(p: Point, tensor: Any) -> bool:
    """Tell whether a tensor has elements; eager passes over empty ones of one dimension."""
    return p.shape_of(tensor) != (0,)


@move("aten.cat", "aten.concat", "aten.concatenate")
def _cat(p: Point, tensors: Sequence[Any], *, dim: int = 0) -> Ref:
    return joined(p, tensors, dim % len(p.shape))


@move("aten.stack")
def _stack(p: Point, tensors: Sequence[Any], *, dim: int = 0) -> Ref:
    d = dim % len(p.shape)
    rest = p.index[:d] + p.index[d + 1 :]
    parts = [(1, lambda place, t=t: p.read(t, rest)) for t in tensors]
    return pieces(p, p.index[d], parts)


def _raised(p: Point, tensors: Sequence[Any], d: int, lies: Callable[[int], Sequence[int]]) -> Ref:
    """Join tensors as if those of few dimensions had more.

    Args:
        p: The point.
        tensors: What is joined.
        d: The dimension along which.
        lies: From a number of dimensions, which of the result's they are.
    """

    def part(tensor: Any) -> tuple[int, Callable[[Index], Ref]]:
        shape = p.shape_of(tensor)
        dims = tuple(lies(len(shape)))
        size = shape[dims.index(d)] if d in dims else 1
        return size, lambda place: p.read(tensor, [place if k == d else p.index[k] for k in dims])

    parts = [part(t) for t in tensors]
    return pieces(p, p.index[d], [one for one in parts if one[0]])


@move("aten.hstack")
def _hstack(p: Point, tensors: Sequence[Any]) -> Ref:
    return _raised(p, tensors, 0 if len(p.shape) == 1 else 1, range)


@move("aten.vstack", "aten.row_stack")
def _vstack(p: Point, tensors: Sequence[Any]) -> Ref:
    return _raised(p, tensors, 0, lambda rank: (1,) if rank == 1 else range(rank))


@move("aten.column_stack")
def _column_stack(p: Point, tensors: Sequence[Any]) -> Ref:
    return _raised(p, tensors, 1, range)


@move("aten.dstack")
def _dstack(p: Point, tensors: Sequence[Any]) -> Ref:
    return _raised(p, tensors, 2, lambda rank: (1,) if rank == 1 else range(rank))


@move("aten.block_diag")
def _block_diag(p: Point, tensors: Sequence[Any]) -> Ref:
    shapes = [((1,) * (2 - len(s)) + tuple(s)) for s in (p.shape_of(t) for t in tensors)]

    def reader(number: int, row: Index) -> Callable[[Index], Ref]:
        def read(column: Index) -> Ref:
            rank = len(p.shape_of(tensors[number]))
            return p.read(tensors[number], (row, column)[2 - rank :])

        return read

    def block(number: int) -> Callable[[Index], Ref]:
        def read(row: Index) -> Ref:
            widths = [shape[1] for shape in shapes]
            before, after = sum(widths[:number]), sum(widths[number + 1 :])
            zero: Callable[[Index], Ref] = lambda place: p.number(0)  # noqa: E731
            parts = [(before, zero), (widths[number], reader(number, row)), (after, zero)]
            return pieces(p, p.index[1], [part for part in parts if part[0]])

        return read

    parts = [(shape[0], block(number)) for number, shape in enumerate(shapes)]
    return pieces(p, p.index[0], [part for part in parts if part[0]])


# --- padding


@move("aten.constant_pad_nd")
def _constant_pad(p: Point, self: Any, *, pad: Sequence[int], value: Number | None = 0) -> Ref:
    return _padded(p, self, list(pad), value or 0, 0, p.index)


def _padded(
    p: Point, self: Any, pad: list[int], value: Number, skip: int, index: tuple[Index, ...]
) -> Ref:
    """Read within the padding of one dimension after the other, the last first."""
    if not pad:
        return p.read(self, index)
    d = len(p.shape) - 1 - skip
    size = p.shape_of(self)[d]
    low, high, *rest = pad

    def inside(place: Index) -> Ref:
        return _padded(p, self, rest, value, skip + 1, replaced(index, d, place))

    def outside(place: Index) -> Ref:
        return p.number(value)

    if low < 0:
        kept = size + low + min(high, 0)
        parts = [(kept, lambda place: inside(place - low)), (max(high, 0), outside)]
    else:
        parts = [(low, outside), (size + min(high, 0), inside), (max(high, 0), outside)]
    return pieces(p, index[d], [part for part in parts if part[0] > 0])


@move("aten.pad")
def _pad(
    p: Point, self: Any, *, pad: Sequence[int], mode: str = "constant", value: Number | None = None
) -> Ref:
    if mode == "constant":
        return _constant_pad(p, self, pad=pad, value=value or 0)
    if mode not in _BORDERS:
        raise Unfusable(f"padding of mode {mode} is left to eager")
    return _bordered(p, self, pad, _BORDERS[mode])


Border = Callable[[int, int, int], Sequence[tuple[int, Callable[[Index], Index]]]]


def _bordered(p: Point, self: Any, pad: Sequence[int], border: Border) -> Ref:
    if min(pad, default=0) < 0:
        raise Unfusable("a border that is cut is left to eager")
    shape = p.shape_of(self)

    def along(d: int, index: tuple[Index, ...]) -> Ref:
        k = 2 * (len(shape) - 1 - d)
        if d < 0 or k >= len(pad):
            return p.read(self, index)
        parts = [
            (size, lambda place, source=source: along(d - 1, replaced(index, d, source(place))))
            for size, source in border(shape[d], pad[k], pad[k + 1])
            if size > 0
        ]
        return pieces(p, index[d], parts)

    return along(len(shape) - 1, p.index)


def _reflect(size: int, low: int, high: int) -> Sequence[tuple[int, Callable[[Index], Index]]]:
    return [(low, lambda i: low - i), (size, _same), (high, lambda i: (size - 2) - i)]


def _replicate(size: int, low: int, high: int) -> Sequence[tuple[int, Callable[[Index], Index]]]:
    return [(low, lambda i: Index()), (size, _same), (high, lambda i: Index(offset=size - 1))]


def _circular(size: int, low: int, high: int) -> Sequence[tuple[int, Callable[[Index], Index]]]:
    return [(low, lambda i: i + (size - low)), (size, _same), (high, _same)]


def _same(index: Index) -> Index:
    return index


_BORDERS: dict[str, Border] = {"reflect": _reflect, "replicate": _replicate, "circular": _circular}

for _rank in (1, 2, 3):

    @move(f"aten.reflection_pad{_rank}d")
    def _reflection_pad(p: Point, self: Any, *, padding: Sequence[int]) -> Ref:
        return _bordered(p, self, padding, _reflect)

    @move(f"aten.replication_pad{_rank}d")
    def _replication_pad(p: Point, self: Any, *, padding: Sequence[int]) -> Ref:
        return _bordered(p, self, padding, _replicate)
