"""The operator `fxkit::integer_product`, which lowering calls where a graph multiplies integers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxkit.analysis.type_inference.own_operators import define_operator
from fxkit.ir.types import TensorType
from fxkit.lower.loop_ir.index import row_major

NAME = "fxkit.integer_product"

# Axes of two matrices; torch's own product takes no more.
_MATRICES = 4

_SCHEMA = "integer_product(Tensor left, Tensor right, Tensor? zeros=None, int zero=0) -> Tensor"


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    return define_operator(_SCHEMA, integer_product, _type)


def _type(left: TensorType, right: TensorType, zeros: Any = None, zero: Any = 0) -> TensorType:
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*batch, left.shape[-2], right.shape[-1])
    strides = tuple(row_major(shape))
    return replace(left, shape=shape, stride=strides, dtype=torch.int32, requires_grad=False)


def integer_product(
    left: Tensor, right: Tensor, zeros: Tensor | None = None, zero: int = 0
) -> Tensor:
    """Return `(left - zeros) @ right`, exact in 32 bits.

    Args:
        left: int8[..., M, K] or uint8[..., M, K].
        right: int8[..., K, N]; batches of both are broadcast.
        zeros: int32[..., M, 1], zero points of the rows, or None.
        zero: The zero point of all rows, where `zeros` is None.

    Returns:
        int32[..., M, N], row by row.
    """
    if left.dtype == torch.uint8:
        left = (left.to(torch.int16) - 128).to(torch.int8)
        zero = zero - 128
        zeros = None if zeros is None else zeros - 128
    sums = _sums(left, right)
    if zeros is None and zero == 0:
        return sums
    return sums - (zero if zeros is None else zeros) * right.sum(-2, True, dtype=torch.int32)


def _sums(left: Tensor, right: Tensor) -> Tensor:
    if left.dim() + right.dim() > _MATRICES or not _is_torch_exact():
        return (left.double() @ right.double()).to(torch.int32)
    return torch.ops.aten._int_mm(_packed(left), _packed(right))


def _packed(matrix: Tensor) -> Tensor:
    """Return a matrix as torch's product reads it rightly.

    torch 2.11 to 2.14 take other strides for granted than those of expanded matrices and of
    transposed ones with one row or column.
    """
    rows, columns = matrix.shape
    is_transposed = rows > 1 and columns > 1 and matrix.stride() == (1, rows)
    if is_transposed or matrix.stride() == (columns, 1):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


@functools.cache
def _is_torch_exact() -> bool:
    """Tell whether torch's own product of integers is exact on this processor.

    Without VNNI, oneDNN adds pairs of products in 16 bits, which saturates.
    """
    most = torch.full((16, 16), 127, dtype=torch.int8)
    return bool((torch.ops.aten._int_mm(most, most) == 16 * 127 * 127).all())
