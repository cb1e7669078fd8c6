"""The operator `fxkit::weight_product`: a layer whose weight is int8, without its scales."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxkit.analysis.type_inference.declared_types import declare_type
from fxkit.ir.types import TensorType

NAME = "fxkit.weight_product"

_libraries: list[torch.library.Library] = []


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    library = torch.library.Library("fxkit", "FRAGMENT")
    library.define("weight_product(Tensor left, Tensor weight) -> Tensor")
    library.impl("weight_product", weight_product, "CompositeImplicitAutograd")
    _libraries.append(library)
    made = torch.ops.fxkit.weight_product.default
    declare_type(made)(_type)
    return made


def _type(left: TensorType, weight: TensorType) -> TensorType:
    shape = (left.shape[0], weight.shape[0])
    return replace(left, shape=shape, stride=(shape[1], 1), requires_grad=False)


def weight_product(left: Tensor, weight: Tensor) -> Tensor:
    """Return `left @ weight.T`.

    Args:
        left: float32[M, K].
        weight: int8[N, K].

    Returns:
        float32[M, N], row by row.
    """
    return F.linear(left, weight.to(left.dtype))
