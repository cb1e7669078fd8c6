"""The operator `fxkit::integer_product`, which lowering calls where a graph multiplies integers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxkit.analysis.type_inference.own_operators import define_operator
from fxkit.ir.types import TensorType

NAME = "fxkit.integer_product"

_SCHEMA = "integer_product(Tensor left, Tensor right, Tensor? zeros=None, int zero=0) -> Tensor"


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    return define_operator(_SCHEMA, integer_product, _type)


def _type(left: TensorType, right: TensorType, zeros: Any = None, zero: Any = 0) -> TensorType:
    shape = (left.shape[0], right.shape[1])
    return replace(left, shape=shape, stride=(shape[1], 1), dtype=torch.int32, requires_grad=False)


def integer_product(
    left: Tensor, right: Tensor, zeros: Tensor | None = None, zero: int = 0
) -> Tensor:
    """Return `(left - zeros) @ right`, exact in 32 bits.

    Args:
        left: int8[M, K] or uint8[M, K].
        right: int8[K, N].
        zeros: int32[M, 1], zero points of the rows, or None.
        zero: The zero point of all rows, where `zeros` is None.

    Returns:
        int32[M, N], row by row.
    """
    if left.dtype == torch.uint8:
        left = (left.to(torch.int16) - 128).to(torch.int8)
        zero = zero - 128
        zeros = None if zeros is None else zeros - 128
    sums = _sums(left, right)
    if zeros is None and zero == 0:
        return sums
    return sums - (zero if zeros is None else zeros) * right.sum(0, dtype=torch.int32)


def _sums(left: Tensor, right: Tensor) -> Tensor:
    if right.shape[0] == 1:  # torch 2.11 to 2.14 read a transposed column wrongly
        return left.to(torch.int32) * right.to(torch.int32)
    return torch.ops.aten._int_mm(left, right)
