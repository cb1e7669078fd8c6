"""Interpolation: rows that read one or several neighbours of a place between elements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.index import Index
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.movement_table import Point, move
from fxkit.lower.operators.scalar_table import call, select

# A tap of an interpolation: where it reads along one dimension, and its weight; None for 1.
Tap = tuple[Index, Ref | None]

_TAPS = {"nearest": 1, "nearest-exact": 1, "linear": 2, "bilinear": 2, "trilinear": 2, "bicubic": 4}
_RANKS = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}


@move("torch.nn.functional.interpolate", pays_alone=False)
def _interpolate(
    p: Point, self: Any, *, size: Any, scale_factor: Any, mode: str, align_corners: bool | None,
    recompute_scale_factor: bool | None, antialias: bool,
) -> Ref:  # fmt: skip
    shape = p.shape_of(self)
    rank = len(shape) - 2
    if mode not in _TAPS or antialias or _RANKS.get(mode, rank) != rank:
        raise Unfusable(f"interpolation by {mode} is left to eager")
    if not p.dtype.is_floating_point or (p.dtype.itemsize < 4 and _TAPS[mode] > 1):
        raise Unfusable("eager computes it in other steps for this dtype")
    given = None if recompute_scale_factor or size is not None else scale_factor
    factors = given if isinstance(given, Sequence) else [given] * rank
    along = [
        _taps(
            p, p.index[d + 2], shape[d + 2], p.shape[d + 2], mode, bool(align_corners), factors[d]
        )
        for d in range(rank)
    ]
    total: Ref | None = None
    for taps in itertools.product(*along):
        x = p.read(self, (*p.index[:2], *(index for index, _ in taps)))
        for _, weight in taps:
            x = x if weight is None else x * weight
        total = x if total is None else total + x
    if total is None:
        raise Unfusable("it has no dimension to interpolate along")
    return total


@move("torch.nn.functional.upsample", pays_alone=False)
def _upsample(
    p: Point, self: Any, *, size: Any, scale_factor: Any, mode: str, align_corners: bool | None
) -> Ref:
    return _interpolate(
        p, self, size=size, scale_factor=scale_factor, mode=mode, align_corners=align_corners,
        recompute_scale_factor=None, antialias=False,
    )  # fmt: skip


@move("torch.nn.functional.upsample_nearest", pays_alone=False)
def _upsample_nearest(p: Point, self: Any, *, size: Any, scale_factor: Any) -> Ref:
    return _upsample(
        p, self, size=size, scale_factor=scale_factor, mode="nearest", align_corners=None
    )


@move("torch.nn.functional.upsample_bilinear", pays_alone=False)
def _upsample_bilinear(p: Point, self: Any, *, size: Any, scale_factor: Any) -> Ref:
    return _upsample(
        p, self, size=size, scale_factor=scale_factor, mode="bilinear", align_corners=True
    )


def _taps(
    p: Point, at: Index, size: int, result: int, mode: str, align: bool, factor: float | None
) -> list[Tap]:
    """Return the elements along one dimension that a result is made of."""
    if _TAPS[mode] == 1:
        return [(_nearest(p, at, size, result, mode == "nearest-exact", factor), None)]
    dtype = p.dtype
    scale = _scale(size, result, factor)
    if align:
        scale = (size - 1) / (result - 1) if result > 1 else 0.0
    place = p.value(at).cast(torch.int32).cast(dtype)
    place = place * scale if align else (place + 0.5) * scale - 0.5
    if mode != "bicubic":
        place = call("max", place, 0.0)
    floor = call("floor", place)
    # No place is as low as -1; there is no vector instruction for (int)floor of any number.
    first = select(place < 0.0, -1, place.cast(torch.int32))
    fraction = call("min", call("max", place - floor, 0.0), 1.0)
    if mode == "bicubic":
        weights = _cubic(fraction)
        near = [_within(first + step, size) for step in (-1, 0, 1, 2)]
        return [(p.place(n), weight) for n, weight in zip(near, weights, strict=True)]
    near = [_within(first, size), _within(first + 1, size)]
    return [(p.place(near[0]), 1.0 - fraction), (p.place(near[1]), fraction)]


def _within(place: Ref, size: int) -> Ref:
    return call("min", call("max", place, 0), size - 1)


def _scale(size: int, result: int, factor: float | None) -> float:
    return 1.0 / factor if factor is not None and factor > 0 else size / result


def _float32(number: float) -> torch.Tensor:
    return torch.tensor(float(number), dtype=torch.float32)


def _nearest(
    p: Point, at: Index, size: int, result: int, is_exact: bool, factor: float | None
) -> Index:
    """Return the nearest element; eager finds it in float32, whatever the dtype."""
    if result == size and not is_exact:
        return at
    if result == 2 * size and not is_exact:
        return p.place(p.value(at) / 2)
    scale = _float32(_scale(size, result, factor)).item()
    if factor is None or factor <= 0:
        scale = (_float32(size) / _float32(result)).item()
    if is_exact:
        place = ((p.value(at).cast(torch.float64) + 0.5) * scale).cast(torch.float32)
    else:
        place = p.value(at).cast(torch.float32) * scale
    return p.place(_within(call("floor", place).cast(torch.int64), size))


def _cubic(t: Ref) -> list[Ref]:
    """Return the weights of four neighbours by Keys' cubic convolution with a = -0.75."""
    a = -0.75

    def near(x: Ref) -> Ref:
        return ((a + 2) * x - (a + 3)) * x * x + 1.0

    def far(x: Ref) -> Ref:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)]
