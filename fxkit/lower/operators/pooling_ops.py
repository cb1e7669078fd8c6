"""Pooling: rows that reduce windows of their operand, see `reduction_ops`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.index import Index
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.movement_table import Point
from fxkit.lower.operators.reduction_table import (
    Arguments,
    IterationDomain,
    Shape,
    largest,
    over_domain,
    smallest,
    total,
)
from fxkit.lower.operators.scalar_table import select


def _each(value: Any, rank: int) -> list[int]:
    """Return a number for each dimension of a window."""
    if isinstance(value, int):
        return [value] * rank
    numbers = list(value)
    return numbers * rank if len(numbers) == 1 else numbers


def _windows(rank: int, count: int = 1) -> Any:
    """Return the domain of a pooling over windows of one size: results, then windows."""

    def domain(
        arguments: Arguments, shapes: Mapping[str, Shape], results: Sequence[Shape]
    ) -> IterationDomain:
        window = _each(arguments["kernel_size"], rank)
        return _over(results[0], window, count)

    return domain


def _over(result: Shape, window: Sequence[int], count: int) -> IterationDomain:
    lead = len(result)
    reduced = tuple(range(lead, lead + len(window)))
    return IterationDomain((*result, *window), reduced, (tuple(range(lead)),) * count)


class _Window:
    """Where the elements of a window lie, along each of its dimensions."""

    def __init__(
        self, p: Point, self_: Any, rank: int, stride: Any, padding: Any, dilation: Any = 1
    ) -> None:
        self.p, self.rank = p, rank
        self.sizes = p.shape_of(self_)[-rank:]
        self.lead = p.index[: len(p.index) - 2 * rank]
        self.window = p.shape[-rank:]
        self.padding = _each(padding, rank)
        self.stride = self.window if stride in (None, [], ()) else _each(stride, rank)
        places = p.index[len(self.lead) : len(self.lead) + rank]
        self.starts = [o * s - b for o, s, b in zip(places, self.stride, self.padding, strict=True)]
        inner = zip(self.starts, p.index[-rank:], _each(dilation, rank), strict=True)
        self.index = [start + k * d for start, k, d in inner]

    def read(self, self_: Any, otherwise: float) -> tuple[Ref, Ref | bool]:
        """Return an element of the window, and whether it lies within the operand."""
        p = self.p
        inside: Ref | bool = True
        for index, size in zip(self.index, self.sizes, strict=True):
            for holds in (_negated(p.below(index, 0)), p.below(index, size)):
                inside = _both(inside, holds)
        read = lambda: p.read(self_, (*self.lead, *self.index))  # noqa: E731
        return p.where(inside, read, lambda: p.number(otherwise)), inside

    def count(self, with_padding: bool) -> Ref:
        """Return the number of elements in a window, or of those within the operand."""
        p = self.p
        count: Ref | None = None
        sides = zip(self.starts, self.sizes, self.window, self.padding, strict=True)
        for start, size, window, padding in sides:
            first = p.value(start)
            end = _clamped("min", first + window, size + padding)
            if not with_padding:
                first, end = _clamped("max", first, 0), _clamped("min", end, size)
            count = end - first if count is None else count * (end - first)
        if count is None:
            raise ValueError("expected a window of at least one dimension, got none")
        return count


def _clamped(op: str, x: Ref, bound: int) -> Ref:
    return x.builder.scalar(op, x, bound)


def _negated(condition: Ref | bool) -> Ref | bool:
    return not condition if isinstance(condition, bool) else ~condition


def _both(a: Ref | bool, b: Ref | bool) -> Ref | bool:
    if isinstance(a, bool):
        return b if a else False
    return (a if b else False) if isinstance(b, bool) else a & b


def _floats_only(p: Point) -> None:
    if not p.dtype.is_floating_point:
        raise Unfusable("pooling of integers is left to eager")


# --- averages


def _avg_pool(rank: int) -> Any:
    def build(
        p: Point, self: Any, *, stride: Any, padding: Any, ceil_mode: bool,
        count_include_pad: bool, divisor_override: int | None,
    ) -> Ref:  # fmt: skip
        _floats_only(p)
        window = _Window(p, self, rank, stride, padding)
        sum_ = total(window.read(self, 0)[0])
        if divisor_override is not None:
            return sum_ / float(divisor_override)
        if not ceil_mode and (count_include_pad or not any(window.padding)):
            return sum_ / float(math.prod(window.window))
        return sum_ / window.count(count_include_pad).cast(sum_.dtype)

    return build


def _lp_pool(rank: int) -> Any:
    def build(p: Point, self: Any, *, norm_type: float, stride: Any, ceil_mode: bool) -> Ref:
        if p.dtype.itemsize < 4 or ceil_mode:
            raise Unfusable("eager computes it in several steps, each rounded")
        window = _Window(p, self, rank, stride, 0)
        x = window.read(self, 0)[0]
        powers = x.builder.scalar("pow", x, float(norm_type))
        sum_ = total(powers)
        magnitude = x.builder.scalar("max", sum_, 0.0)
        return x.builder.scalar("pow", magnitude, 1.0 / norm_type)

    return build


# --- extrema


def _max_pool(rank: int, has_places: bool) -> Any:
    def build(p: Point, self: Any, *, stride: Any, padding: Any, dilation: Any) -> Any:
        _floats_only(p)
        window = _Window(p, self, rank, stride, padding, dilation)
        x, inside = window.read(self, -math.inf)
        top = largest(x)
        places = (p, window.index, window.sizes, x, top, inside)
        return (top, _place_of(*places)) if has_places else top

    return build


def _place_of(
    p: Point, at: Sequence[Index], sizes: Sequence[int], x: Ref, top: Ref, inside: Ref | bool
) -> Ref:
    """Return the number of the first of the largest elements, or of the last NaN."""
    number = Index()
    for index, size in zip(at, sizes, strict=True):
        number = number * size + index
    place = p.value(number)
    count = math.prod(sizes)
    is_top, is_nan = x.equals(top), x.differs(x)
    if not isinstance(inside, bool):
        is_top = is_top & inside
    builder = x.builder
    first = smallest(select(is_top, place, builder.const(count - 1, torch.int64)))
    last = largest(select(is_nan, place, builder.const(0, torch.int64)))
    return select(top.differs(top), last, first)


for _rank in (1, 2, 3):
    over_domain(f"aten.avg_pool{_rank}d", domain=_windows(_rank))(_avg_pool(_rank))
    over_domain(f"aten.max_pool{_rank}d", domain=_windows(_rank))(_max_pool(_rank, False))
    placed = f"aten.max_pool{_rank}d_with_indices"
    python = f"torch.nn.functional.max_pool{_rank}d_with_indices"
    over_domain(placed, python, domain=_windows(_rank, 2), slow=True)(_max_pool(_rank, True))
    over_domain(f"torch.nn.functional.lp_pool{_rank}d", domain=_windows(_rank))(_lp_pool(_rank))


# --- windows that divide an operand into a given number of parts


def _parts(rank: int, count: int = 1) -> Any:
    """Return the domain of an adaptive pooling: results, then the longest window."""

    def domain(
        arguments: Arguments, shapes: Mapping[str, Shape], results: Sequence[Shape]
    ) -> IterationDomain:
        sizes = shapes["self"][-rank:]
        parts = results[0][-rank:]
        longest = [_longest(size, n) for size, n in zip(sizes, parts, strict=True)]
        return _over(results[0], longest, count)

    return domain


def _longest(size: int, parts: int) -> int:
    return max(-(-(o + 1) * size // parts) - o * size // parts for o in range(parts))


def _divided(
    p: Point, self: Any, rank: int, otherwise: float
) -> tuple[Ref, Ref | None, list[Index], Ref | bool]:
    """Return an element of a part, the part's size where it varies, its index, and if it is one."""
    lead = p.index[: len(p.index) - 2 * rank]
    sizes, parts = p.shape_of(self)[-rank:], p.shape[len(lead) : len(lead) + rank]
    inside: Ref | bool = True
    count: Ref | None = None
    index: list[Index] = []
    outer, inner = p.index[len(lead) : len(lead) + rank], p.index[-rank:]
    for o, k, size, n in zip(outer, inner, sizes, parts, strict=True):
        if size % n == 0:
            index.append(o * (size // n) + k)
            continue
        first = p.value(o * size) / n
        end = (p.value(o * size) + (size + n - 1)) / n
        inside = _both(inside, p.value(k) < end - first)
        index.append(p.place(first) + k)
        count = end - first if count is None else count * (end - first)
    whole = math.prod(
        longest for longest, s, n in zip(p.shape[-rank:], sizes, parts, strict=True) if s % n == 0
    )
    count = None if count is None else count * whole
    x = p.where(inside, lambda: p.read(self, (*lead, *index)), lambda: p.number(otherwise))
    return x, count, index, inside


def _adaptive_avg_pool(rank: int | None) -> Any:
    def build(p: Point, self: Any) -> Ref:
        _floats_only(p)
        rank_ = len(p.shape_of(self)) - 2 if rank is None else rank
        return _mean_of_part(p, self, rank_)

    return build


def _mean_of_part(p: Point, self: Any, rank: int) -> Ref:
    x, count, _, _ = _divided(p, self, rank, 0)
    if count is None:
        return total(x) / float(math.prod(p.shape[-rank:]))
    return total(x) / count.cast(x.dtype)


def _adaptive_max_pool(rank: int) -> Any:
    def build(p: Point, self: Any) -> tuple[Ref, Ref]:
        _floats_only(p)
        x, _, index, inside = _divided(p, self, rank, -math.inf)
        top = largest(x)
        return top, _place_of(p, index, p.shape_of(self)[-rank:], x, top, inside)

    return build


for _rank in (1, 2, 3):
    over_domain(f"aten.adaptive_avg_pool{_rank}d", domain=_parts(_rank))(_adaptive_avg_pool(_rank))
    python = f"torch.nn.functional.adaptive_max_pool{_rank}d_with_indices"
    names = (f"aten.adaptive_max_pool{_rank}d", python)
    over_domain(*names, domain=_parts(_rank, 2))(_adaptive_max_pool(_rank))


def _areas(
    arguments: Arguments, shapes: Mapping[str, Shape], results: Sequence[Shape]
) -> IterationDomain:
    return _parts(len(shapes["self"]) - 2)(arguments, shapes, results)


over_domain("torch.nn.functional.interpolate.area", domain=_areas)(_adaptive_avg_pool(None))
