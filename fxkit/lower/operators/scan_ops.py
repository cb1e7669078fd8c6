"""Cumulative sums and their kin: more entries of the table of reductions, see `reduction_ops`."""

from __future__ import annotations

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.operators.reduction_table import by_dim, row, scanned, sum_dtype
from fxkit.lower.operators.scalar_table import select


@row("aten.cumsum", axes=by_dim, dtype=sum_dtype, keeps_row=1)
def _cumsum(self: Ref) -> Ref:
    return scanned("add", self).cast(self.dtype)


@row("aten.cumprod", axes=by_dim, dtype=sum_dtype, keeps_row=1)
def _cumprod(self: Ref) -> Ref:
    return scanned("mul", self).cast(self.dtype)


@row("aten.logcumsumexp", axes=by_dim, keeps_row=1)
def _logcumsumexp(self: Ref) -> Ref:
    return self.builder.scan("logaddexp", self.cast(torch.float64)).cast(self.dtype)


@row("aten.cummax", axes=by_dim, keeps_row=2, tolerance=0, slow_along=True)
def _cummax(self: Ref, *, place: Ref) -> tuple[Ref, ...]:
    return _extrema(self, "max", place)


@row("aten.cummin", axes=by_dim, keeps_row=2, tolerance=0, slow_along=True)
def _cummin(self: Ref, *, place: Ref) -> tuple[Ref, ...]:
    return _extrema(self, "min", place)


def _extrema(x: Ref, monoid: str, place: Ref) -> tuple[Ref, ...]:
    """Return the extremum of the row up to a point, and where it last was met."""
    builder = x.builder
    extremum = builder.scan(monoid, x)
    is_there = x.equals(extremum)
    if x.is_float:
        is_there = is_there | x.differs(x)
    return extremum, builder.scan("max", select(is_there, place, builder.const(0, torch.int64)))
