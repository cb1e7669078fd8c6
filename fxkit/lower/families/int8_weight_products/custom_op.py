"""The operator `fxkit::int8_weight_product`: a layer whose weight is int8, without its scales."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fxkit.analysis.type_inference.own_operators import define_operator
from fxkit.ir.types import TensorType

NAME = "fxkit.int8_weight_product"


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    return define_operator(
        "int8_weight_product(Tensor left, Tensor weight) -> Tensor", int8_weight_product, _type
    )


def _type(left: TensorType, weight: TensorType) -> TensorType:
    shape = (left.shape[0], weight.shape[0])
    return replace(left, shape=shape, stride=(shape[1], 1), requires_grad=False)


def int8_weight_product(left: Tensor, weight: Tensor) -> Tensor:
    """Return `left @ weight.T`.

    Args:
        left: float32[M, K].
        weight: int8[N, K].

    Returns:
        float32[M, N], row by row.
    """
    return F.linear(left, weight.to(left.dtype))
