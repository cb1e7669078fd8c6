"""The operator `fxkit::int4_product`: layers whose weights have 4 bits, in groups."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor

from fxkit.analysis.type_inference.own_operators import define_operator
from fxkit.ir.types import TensorType
from fxkit.lower.loop_ir.nibbles import unpacked_nibbles

NAME = "fxkit.int4_product"

_SCHEMA = (
    "int4_product(Tensor left, Tensor packed, Tensor scales, Tensor? zero_points, int group, "
    "Tensor? zeros=None, int zero=0) -> Tensor"
)


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    return define_operator(_SCHEMA, int4_product, _type)


def _type(
    left: TensorType,
    packed: TensorType,
    scales: TensorType,
    zero_points: Any,
    group: int,
    zeros: Any = None,
    zero: Any = 0,
) -> TensorType:
    shape = (left.shape[0], packed.shape[0])
    kind = scales.dtype
    return replace(left, shape=shape, stride=(shape[1], 1), dtype=kind, requires_grad=False)


def int4_product(
    left: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    group: int,
    zeros: Tensor | None = None,
    zero: int = 0,
) -> Tensor:
    """Return `(left - zeros) @ ((weight - zero_points) * scales).T` for a weight in groups.

    Args:
        left: float32[M, K], int8[M, K] or uint8[M, K]; integers are summed exactly by group.
        packed: int8[N, K / 2], two integers of 4 bits to a byte; see `packed_nibbles`.
        scales: float32[N, K / group].
        zero_points: Integers or float32 of the same shape; None where all are 0.
        group: How many integers of a row share a scale; even.
        zeros: int32[M, 1], zero points of the rows, or None.
        zero: The zero point of all rows, where `zeros` is None.

    Returns:
        float32[M, N], row by row.
    """
    kind = scales.dtype
    weight = unpacked_nibbles(packed).to(kind).unflatten(1, (-1, group))
    if zero_points is not None:
        weight = weight - zero_points[..., None]
    weight = (weight * scales[..., None]).flatten(1)
    return (left.to(kind) - (zero if zeros is None else zeros)) @ weight.t()
