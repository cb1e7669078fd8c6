"""The operator `fxkit::integer_attention`: two products of integers with a softmax between."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxkit.analysis.type_inference.own_operators import define_operator
from fxkit.ir.types import TensorType
from fxkit.lower.families.integer_products.custom_op import integer_product
from fxkit.lower.loop_ir.index import row_major

NAME = "fxkit.integer_attention"

_SCHEMA = (
    "integer_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, "
    "int[] zeros, float step, int[] bounds, ScalarType dtype, float value_scale, "
    "bool divides_last=False) -> Tensor"
)


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    return define_operator(_SCHEMA, integer_attention, _type)


def _type(query: TensorType, key: TensorType, value: TensorType, *_: Any) -> TensorType:
    shape = (*query.shape[:-1], value.shape[-1])
    strides = tuple(row_major(shape))
    return replace(query, shape=shape, stride=strides, dtype=torch.float32, requires_grad=False)


def integer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    zeros: list[int],
    step: float,
    bounds: list[int],
    dtype: torch.dtype,
    value_scale: float,
    divides_last: bool = False,
) -> Tensor:
    """Return what integers give for `softmax(query @ key.mT * scale + mask) @ value`.

    Weights are rounded to 8 bits; both products are exact.

    Args:
        query: int8[..., M, K] or uint8[..., M, K].
        key: int8[..., N, K].
        value: int8[..., N, V].
        mask: float32, added to the scores, or bool, False where a key may not be seen; None.
        scale: What sums of the first product are multiplied by.
        zeros: Zero points of query, key, weights and value.
        step: The scale of the weights.
        bounds: Least and greatest integer of the weights.
        dtype: Their type, int8 or uint8.
        value_scale: The scale of the values.
        divides_last: Whether weights are rounded before they are divided by their sum, when the
            greatest of a row is 1; otherwise they are what softmax gives.

    Returns:
        float32[..., M, V].
    """
    q_zero, k_zero, w_zero, v_zero = zeros
    scores = _product(query, key.mT, q_zero, k_zero).to(torch.float32) * scale
    if mask is not None:
        is_choice = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_choice else scores + mask
    if divides_last:
        weights = torch.exp(scores - scores.amax(-1, True))
    else:
        weights = torch.softmax(scores, -1)
    rounded = (torch.round(weights * (1.0 / step)) + w_zero).clamp(*bounds).to(dtype)
    result = _product(rounded, value, w_zero, v_zero).to(torch.float32) * (step * value_scale)
    return result / weights.sum(-1, True) if divides_last else result


def _product(left: Tensor, right: Tensor, left_zero: int, right_zero: int) -> Tensor:
    sums = integer_product(left, right, None, left_zero)
    total = left.sum(-1, True, dtype=torch.int32) - left.shape[-1] * left_zero
    return sums - right_zero * total
