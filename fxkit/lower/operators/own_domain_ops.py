"""Reductions with an iteration domain of their own: group norms, traces, losses of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.index import Index
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.indexing_ops import checked
from fxkit.lower.operators.movement_table import Point
from fxkit.lower.operators.reduction_table import (
    Arguments,
    IterationDomain,
    Shape,
    function,
    largest,
    over_domain,
    total,
)
from fxkit.lower.operators.scalar_table import select

Shapes = Mapping[str, Shape]


# --- groups of channels


def _groups(arguments: Arguments, shapes: Shapes, results: Sequence[Shape]) -> IterationDomain:
    batch, channels, *rest = shapes["input"]
    groups = arguments["num_groups"]
    sizes = (batch, groups, channels // groups, *rest)
    joint = len(sizes)
    result = (0, joint, *range(3, len(sizes)))
    return IterationDomain(sizes, tuple(range(2, len(sizes))), (result,), ((1, 2),))


@over_domain("aten.group_norm", domain=_groups)
def _group_norm(
    p: Point, input: Any, weight: Any, bias: Any, *, eps: float, num_groups: int
) -> Ref:
    batch, group, within, *rest = p.index
    channel = group * p.shape[2] + within
    x = p.read(input, (batch, channel, *rest))
    count = 1
    for size in p.shape[2:]:
        count *= size
    centred = x - total(x) / count
    result = centred * (1.0 / function("sqrt", total(centred * centred) / count + eps))
    if weight is not None:
        result = result * p.read(weight, (channel,))
    return result if bias is None else result + p.read(bias, (channel,))


# --- the diagonal


def _diagonal(arguments: Arguments, shapes: Shapes, results: Sequence[Shape]) -> IterationDomain:
    return IterationDomain((min(shapes["self"]),), (0,), ((),))


@over_domain("aten.trace", domain=_diagonal)
def _trace(p: Point, self: Any) -> Ref:
    return total(p.read(self, (p.index[0], p.index[0])))


# --- losses that pick a class


def _targets(arguments: Arguments, shapes: Shapes, results: Sequence[Shape]) -> IterationDomain:
    """Run over the targets; reduce all of them unless each has its own loss."""
    target = shapes["target"]
    axes = tuple(range(len(target)))
    is_reduced = arguments["reduction"] != 0
    return IterationDomain(target, axes if is_reduced else (), ((),) if is_reduced else (axes,))


def _picked(p: Point, target: Ref, classes: int, ignored: int) -> tuple[Index, Ref]:
    """Return a class as an index, and whether it counts; eager raises for one out of range."""
    if target.dtype != torch.int64:
        raise Unfusable("classes of other than 64 bits are left to eager")
    counts = target.differs(ignored)
    p.require(~counts | ((target >= 0) & (target < classes)))
    zero = target.builder.const(0, torch.int64)
    return p.place(select(counts, target, zero)), counts


@over_domain("aten.nll_loss_nd", "aten.nll_loss", "aten.nll_loss2d", domain=_targets, checks=True)
def _nll_loss(
    p: Point, self: Any, target: Any, weight: Any, *, reduction: int, ignore_index: int
) -> Ref:
    shape = p.shape_of(self)
    d = 1 if len(shape) > 1 else 0
    wanted = p.read_own(target, p.index)
    place, counts = _picked(p, wanted, shape[d], ignore_index)
    picked = -p.read(self, (*p.index[:d], place, *p.index[d:]))
    scale = p.number(1) if weight is None else p.read(weight, (place,))
    loss = select(counts, picked * scale, p.number(0))
    if not reduction:
        return loss
    return (
        total(loss) / total(select(counts, scale, p.number(0))) if reduction == 1 else total(loss)
    )


def _classes(arguments: Arguments, shapes: Shapes, results: Sequence[Shape]) -> IterationDomain:
    """Run over the scores; reduce the classes, and with one target all there is."""
    shape = shapes["self"]
    d = 1 if len(shape) > 1 else 0
    rest = tuple(axis for axis in range(len(shape)) if axis != d)
    if arguments["reduction"] != 0 and rest:
        raise Unfusable("it reduces what was reduced before")
    if shapes["target"] == shape and rest:
        raise Unfusable("its targets are probabilities")
    return IterationDomain(shape, (d,), (rest,))


@over_domain("aten.cross_entropy_loss", domain=_classes, checks=True)
def _cross_entropy(
    p: Point, self: Any, target: Any, weight: Any, *, reduction: int, ignore_index: int,
    label_smoothing: float,
) -> Ref:  # fmt: skip
    shape = p.shape_of(self)
    d = 1 if len(shape) > 1 else 0
    if label_smoothing or weight is not None or reduction:
        raise Unfusable("cross entropy with class weights or label smoothing is left to eager")
    x = p.read(self, p.index)
    top = largest(x)
    sum_ = total(function("exp", x - top))
    wanted = p.read_own(target, (*p.index[:d], *p.index[d + 1 :]))
    place, counts = _picked(p, wanted, shape[d], ignore_index)
    picked = p.read(self, (*p.index[:d], place, *p.index[d + 1 :]))
    return select(counts, function("log", sum_) - (picked - top), p.number(0))


def _margins(arguments: Arguments, shapes: Shapes, results: Sequence[Shape]) -> IterationDomain:
    """Run over the scores; reduce the classes."""
    if arguments["reduction"] not in (0, "none"):
        raise Unfusable("it reduces what was reduced before")
    if len(shapes["self"]) != 2:
        raise Unfusable("scores without a batch are left to eager")
    return IterationDomain(shapes["self"], (1,), ((0,),))


@over_domain(
    "aten.multi_margin_loss", "torch.nn.functional.multi_margin_loss", domain=_margins, checks=True
)  # fmt: skip
def _multi_margin_loss(
    point: Point, self: Any, target: Any, weight: Any, *, p: int, margin: float
) -> Ref:
    if not point.dtype.is_floating_point or point.dtype.itemsize == 2:
        raise Unfusable("margins of other than float32 and float64 are left to eager")
    row, column = point.index
    wanted = point.read_own(target, (row,))
    place = checked(point, wanted, point.shape[1])
    short = margin - point.read(self, (row, place)) + point.read(self, (row, column))
    lacks = short if p == 1 else short * short
    lacks = lacks if weight is None else lacks * point.read(weight, (place,))
    counts = (short > 0) & point.value(column).differs(wanted.cast(torch.int64))
    return total(select(counts, lacks, point.number(0))) / float(point.shape[1])
