"""Row programs: operators that reduce along axes, as loop IR. One function is one row of the table.

The first parameter is the operand whose row is reduced; other positional parameters are operands
along the same row, or None. Keyword-only parameters are attributes with the names of ATen's schema,
and `count`, the number of elements in a row. Sums are taken in float32 with several accumulators
and kept in float64 between blocks of the row, so that long rows stay accurate.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.lower.loops.loop_ir import Ref, Unfusable, register_of
from fxkit.lower.operators.scalar_table import select


@dataclass(frozen=True)
class RowOp:
    """A row of the table.

    Attributes:
        name: Operator identity.
        build: Makes the row program; returns one value, or a tuple for several results.
        axes: Returns the dimensions that are reduced, from the arguments and the operand's rank.
        keeps_row: Whether the first result has the operand's shape, as that of softmax has.
        keeps_dims: Whether row scalars keep their reduced dimensions where nothing says so.
        tolerance: Largest difference from eager in epsilons, relative to max(1, |result|).
        operands: Names of the operands; the first one's rows are reduced.
        attributes: Names of the attributes.
    """

    name: str
    build: Callable[..., Ref | tuple[Ref, ...]]
    axes: Callable[[Mapping[str, Any], int], tuple[int, ...]]
    keeps_row: bool
    keeps_dims: bool
    tolerance: float
    operands: tuple[str, ...]
    attributes: tuple[str, ...]

    def input_dtype(
        self, arguments: Mapping[str, Any], dtypes: Sequence[torch.dtype]
    ) -> torch.dtype:
        """Return the dtype that the operands are cast to before anything else."""
        asked = arguments.get("dtype")
        if isinstance(asked, torch.dtype):
            return asked
        own = functools.reduce(torch.promote_types, dtypes)
        if self.name in ("aten.sum", "aten.prod") and not own.is_floating_point:
            return torch.int64
        return own


TABLE: dict[str, RowOp] = {}


def _row(
    *names: str,
    axes: Callable[[Mapping[str, Any], int], tuple[int, ...]],
    keeps_row: bool = False,
    keeps_dims: bool = False,
    tolerance: float = 8,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add_row(build: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(build).parameters.values()
        attributes = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        operands = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        for name in names:
            TABLE[name] = RowOp(
                name, build, axes, keeps_row, keeps_dims, tolerance, operands, attributes
            )
        return build

    return add_row


def variant(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the name of the row that serves a call of an operator that has several."""
    return name


def _dims(value: Any, rank: int) -> tuple[int, ...]:
    """Return dimensions counted from the front; None or an empty list means all of them."""
    if isinstance(value, int):
        value = [value]
    if not isinstance(value, Sequence) or not len(value):
        return tuple(range(rank))
    return tuple(sorted(d % rank for d in value)) if rank else ()


def _dim(arguments: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    return _dims(arguments.get("dim"), rank)


def _normalized_shape(arguments: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    return tuple(range(rank - len(arguments["normalized_shape"]), rank))


def _add(x: Ref) -> Ref:
    return x.builder.reduce("add", x)


def _exp(x: Ref) -> Ref:
    return x.builder.scalar("exp", x)


def _sqrt(x: Ref) -> Ref:
    return x.builder.scalar("sqrt", x)


@_row("aten.sum", axes=_dim)
def _sum(self: Ref) -> Ref:
    return _add(self)


@_row("aten.mean", axes=_dim)
def _mean(self: Ref, *, count: int) -> Ref:
    return _add(self) / count


@_row("aten.amax", axes=_dim, tolerance=0)
def _amax(self: Ref) -> Ref:
    return self.builder.reduce("max", self)


@_row("aten.amin", axes=_dim, tolerance=0)
def _amin(self: Ref) -> Ref:
    return self.builder.reduce("min", self)


@_row("aten.var", axes=_dim)
def _var(self: Ref, *, count: int, correction: float | None, unbiased: bool | None) -> Ref:
    if correction is None:
        correction = 1 if unbiased in (None, True) else 0
    centred = self - _add(self) / count
    return _add(centred * centred) / float(max(0, count - correction))


@_row("aten.std", axes=_dim)
def _std(self: Ref, *, count: int, correction: float | None, unbiased: bool | None) -> Ref:
    return _sqrt(_var(self, count=count, correction=correction, unbiased=unbiased))


@_row("aten.linalg_vector_norm", axes=_dim)
def _vector_norm(self: Ref, *, ord: float) -> Ref:
    if ord == 2:
        return _sqrt(_add(self * self))
    magnitude = self.builder.scalar("abs", self)
    if ord == 1:
        return _add(magnitude)
    if ord == math.inf:
        return self.builder.reduce("max", magnitude)
    raise Unfusable(f"a norm is fused for orders 1, 2 and inf, not {ord}")


@_row("aten.norm", axes=_dim)
def _norm(self: Ref, *, p: float | None) -> Ref:
    return _vector_norm(self, ord=2 if p is None else p)


@_row("torch.nn.functional.normalize", axes=_dim, keeps_row=True)
def _normalize(input: Ref, *, p: float, eps: float) -> Ref:
    return input / input.builder.scalar("max", _vector_norm(input, ord=p), eps)


@_row("aten.softmax", axes=_dim, keeps_row=True)
def _softmax(self: Ref) -> Ref:
    powers = _exp(self - self.builder.reduce("max", self))
    return powers / _add(powers)


@_row("aten.log_softmax", axes=_dim, keeps_row=True)
def _log_softmax(self: Ref) -> Ref:
    shifted = self - self.builder.reduce("max", self)
    return shifted - self.builder.scalar("log", _add(_exp(shifted)))


@_row("aten.logsumexp", axes=_dim)
def _logsumexp(self: Ref) -> Ref:
    largest = self.builder.reduce("max", self)
    is_infinite = self.builder.scalar("abs", largest).equals(math.inf)
    shift = select(is_infinite, self.builder.const(0.0, largest.dtype), largest)
    return self.builder.scalar("log", _add(_exp(self - shift))) + shift


@_row("aten.layer_norm", axes=_normalized_shape, keeps_row=True)
def _layer_norm(input: Ref, weight: Ref | None, bias: Ref | None, *, eps: float, count: int) -> Ref:
    return _native_layer_norm(input, weight, bias, eps=eps, count=count)[0]


@_row("aten.native_layer_norm", axes=_normalized_shape, keeps_row=True, keeps_dims=True)
def _native_layer_norm(
    input: Ref, weight: Ref | None, bias: Ref | None, *, eps: float, count: int
) -> tuple[Ref, ...]:
    mean = _add(input) / count
    centred = input - mean
    scale = 1.0 / _sqrt(_add(centred * centred) / count + eps)
    result = centred * scale
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result, mean, scale


@_row("aten.rms_norm", axes=_normalized_shape, keeps_row=True)
def _rms_norm(input: Ref, weight: Ref | None, *, eps: float | None, count: int) -> Ref:
    if eps is None:
        eps = torch.finfo(register_of(input.dtype)).eps
    result = input * (1.0 / _sqrt(_add(input * input) / count + eps))
    return result if weight is None else result * weight
