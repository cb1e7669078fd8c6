"""Row programs: operators that reduce along axes, as loop IR. One function is one row of the table.

Positional parameters are operands, tensors that are broadcast to one shape, or None. Keyword-only
parameters are attributes with the names of ATen's schema, and `count`, the number of elements in a
row. Sums are taken in float32 with several accumulators and kept in float64 between blocks of the
row, so that long rows stay accurate.
"""

from __future__ import annotations

import math

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators import (
    distance_ops,
    loss_ops,
    normalising_ops,
    own_domain_ops,
    pooling_ops,
    scan_ops,
)
from fxkit.lower.operators.distance_ops import vector_norm
from fxkit.lower.operators.reduction_table import (
    TABLE,
    Arguments,
    ReductionOp,
    by_dim,
    centred,
    every_dim,
    finite_or_zero,
    float_dtype,
    function,
    largest,
    row,
    smallest,
    sum_dtype,
    total,
)
from fxkit.lower.operators.scalar_table import multiply_add, select

__all__ = [
    "TABLE", "ReductionOp", "distance_ops", "loss_ops", "normalising_ops", "own_domain_ops",
    "pooling_ops", "scan_ops", "variant",
]  # fmt: skip


def variant(name: str, arguments: Arguments) -> str:
    """Return the name of the row that serves a call of an operator that has several."""
    if name in ("aten.max", "aten.min"):
        if "other" in arguments:
            return f"{name}imum"
        return f"{name}.dim" if "dim" in arguments else name
    if arguments.get("mode") == "area":
        return f"{name}.area"
    is_reduced = arguments.get("reduction") not in (None, 0, "none")
    return f"{name}.reduced" if is_reduced and f"{name}.reduced" in TABLE else name


# --- sums and counts


@row("aten.sum", axes=by_dim, dtype=sum_dtype)
def _sum(self: Ref) -> Ref:
    return total(self)


@row("aten.nansum", axes=by_dim, dtype=sum_dtype)
def _nansum(self: Ref) -> Ref:
    return total(_without_nan(self))


@row("aten.mean", axes=by_dim)
def _mean(self: Ref, *, count: int) -> Ref:
    return total(self) / count


@row("aten.nanmean", axes=by_dim)
def _nanmean(self: Ref) -> Ref:
    numbers = total(self.equals(self).cast(torch.int64))
    return total(_without_nan(self)) / numbers.cast(self.dtype)


@row("aten.prod", axes=by_dim, dtype=sum_dtype)
def _prod(self: Ref) -> Ref:
    # In float64, partial products of float32 neither overflow nor vanish.
    wide = self.cast(torch.float64) if self.dtype == torch.float32 else self
    return self.builder.reduce("mul", wide).cast(self.dtype)


@row("aten.count_nonzero", axes=by_dim)
def _count_nonzero(self: Ref) -> Ref:
    return total(self.cast(torch.bool).cast(torch.int64))


def _without_nan(x: Ref) -> Ref:
    return select(x.differs(x), x.builder.const(0, x.dtype), x) if x.is_float else x


# --- extrema


@row("aten.amax", "aten.max", axes=by_dim, tolerance=0)
def _amax(self: Ref) -> Ref:
    return largest(self)


@row("aten.amin", "aten.min", axes=by_dim, tolerance=0)
def _amin(self: Ref) -> Ref:
    return smallest(self)


@row("aten.aminmax", axes=by_dim, tolerance=0)
def _aminmax(self: Ref) -> tuple[Ref, ...]:
    return smallest(self), largest(self)


@row("aten.any", axes=by_dim, tolerance=0)
def _any(self: Ref) -> Ref:
    return largest(self.cast(torch.bool).cast(torch.int32)).cast(torch.bool)


@row("aten.all", axes=by_dim, tolerance=0)
def _all(self: Ref) -> Ref:
    return smallest(self.cast(torch.bool).cast(torch.int32)).cast(torch.bool)


@row("aten.max.dim", axes=by_dim, tolerance=0)
def _max_dim(self: Ref, *, place: Ref, count: int) -> tuple[Ref, ...]:
    top = largest(self)
    return top, _first_place(self, top, place, count)


@row("aten.min.dim", axes=by_dim, tolerance=0)
def _min_dim(self: Ref, *, place: Ref, count: int) -> tuple[Ref, ...]:
    bottom = smallest(self)
    return bottom, _first_place(self, bottom, place, count)


@row("aten.argmax", axes=by_dim, tolerance=0)
def _argmax(self: Ref, *, place: Ref, count: int) -> Ref:
    return _first_place(self, largest(self), place, count)


@row("aten.argmin", axes=by_dim, tolerance=0)
def _argmin(self: Ref, *, place: Ref, count: int) -> Ref:
    return _first_place(self, smallest(self), place, count)


def _first_place(x: Ref, extremum: Ref, place: Ref, count: int) -> Ref:
    """Return where a row first has its extremum, or its first NaN, which then is the extremum."""
    is_there = x.equals(extremum)
    if x.is_float:
        is_there = is_there | x.differs(x)
    dtype = torch.int32 if count < 2**31 else torch.int64
    place, last = place.cast(dtype), place.builder.const(count - 1, dtype)
    return smallest(select(is_there, place, last)).cast(torch.int64)


# --- spread


@row("aten.var", axes=by_dim)
def _var(self: Ref, *, count: int, correction: float | None, unbiased: bool | None) -> Ref:
    return _var_mean(self, count=count, correction=correction, unbiased=unbiased)[0]


@row("aten.std", axes=by_dim)
def _std(self: Ref, *, count: int, correction: float | None, unbiased: bool | None) -> Ref:
    return _std_mean(self, count=count, correction=correction, unbiased=unbiased)[0]


@row("aten.var_mean", axes=by_dim)
def _var_mean(
    self: Ref, *, count: int, correction: float | None, unbiased: bool | None
) -> tuple[Ref, ...]:
    if correction is None:
        correction = 1 if unbiased in (None, True) else 0
    # As in eager: squares of numbers from 1e19 on are no float32.
    _, mean, squares = centred(self.cast(torch.float64), count)
    return squares / float(max(0, count - correction)), mean


@row("aten.std_mean", axes=by_dim)
def _std_mean(
    self: Ref, *, count: int, correction: float | None, unbiased: bool | None
) -> tuple[Ref, ...]:
    var, mean = _var_mean(self, count=count, correction=correction, unbiased=unbiased)
    return function("sqrt", var), mean


# --- softmax and its kin


@row("aten.softmax", axes=by_dim, keeps_row=1)
def _softmax(self: Ref) -> Ref:
    powers = function("exp", _below_largest(self))
    return powers / total(powers)


def _below_largest(value: Ref) -> Ref:
    """Return a value less the largest of its row.

    A power of two that scales it changes no digit: the largest is found without it, and scaling and
    subtracting round once together. Only of a result that is next to 0 may a last digit differ.
    """
    scaled = value.builder.scaled_down(value)
    if scaled is None:
        return value - largest(value)
    unscaled, scale = scaled
    return multiply_add(unscaled, scale, -(largest(unscaled) * scale))


@row("torch.nn.functional.softmin", axes=by_dim, keeps_row=1)
def _softmin(self: Ref, *, dim: int | None) -> Ref:
    if dim is None:
        raise Unfusable("it takes a dimension by the number of dimensions, and warns")
    return _softmax(-self)


@row("aten._safe_softmax", axes=by_dim, keeps_row=1)
def _safe_softmax(self: Ref) -> Ref:
    top = largest(self)
    is_masked = top.equals(-math.inf)
    powers = function("exp", self - finite_or_zero(top))
    # The sum of a row that is masked as a whole is zero; of any other it is not.
    ones = self.builder.const(1.0, self.dtype)
    scaled = powers / select(is_masked, ones, total(powers))
    return select(top.equals(math.inf), self - top, scaled)


@row("aten.log_softmax", axes=by_dim, keeps_row=1)
def _log_softmax(self: Ref) -> Ref:
    shifted = self - largest(self)
    return shifted - function("log", total(function("exp", shifted)))


@row("aten.logsumexp", axes=by_dim, dtype=float_dtype)
def _logsumexp(self: Ref) -> Ref:
    shift = finite_or_zero(largest(self))
    return function("log", total(function("exp", self - shift))) + shift


@row("aten._softmax_backward_data", axes=by_dim, keeps_row=1)
def _softmax_backward(grad_output: Ref, output: Ref) -> Ref:
    scaled = grad_output * output
    return scaled - output * total(scaled)


@row("aten._log_softmax_backward_data", axes=by_dim, keeps_row=1)
def _log_softmax_backward(grad_output: Ref, output: Ref) -> Ref:
    return grad_output - function("exp", output) * total(grad_output)


# --- products of vectors


@row("aten.dot", "aten.vdot", axes=every_dim)
def _dot(self: Ref, tensor: Ref | None, other: Ref | None) -> Ref:
    second = tensor or other
    if second is None:
        raise Unfusable("it has one operand only")
    return total(self * second)


@row("aten.linalg_vecdot", axes=by_dim)
def _vecdot(x: Ref, y: Ref) -> Ref:
    return total(x * y)


@row("aten.renorm", axes=lambda a, rank: tuple(d for d in range(rank) if d != a["dim"] % rank),
     keeps_row=1)  # fmt: skip
def _renorm(self: Ref, *, p: float, maxnorm: float) -> Ref:
    norm = vector_norm(self, p)
    factor = select(norm > maxnorm, maxnorm / (norm + 1e-7), self.builder.const(1.0, self.dtype))
    return self * factor
