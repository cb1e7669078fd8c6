"""Private calls of torch that pack a weight for MKL."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fxkit.lower.library_calls.torch_calls import has_calls

# Names of the operators → how many arguments they take in the versions that are known.
_CALLS = {"_mkl_linear.default": 5, "_mkl_reorder_linear_weight.default": 2}


@functools.cache
def is_available() -> bool:
    """Tell whether torch has been built with MKL, and with what packs weights for it."""
    return torch.backends.mkl.is_available() and has_calls(torch.ops.mkl, _CALLS)


def pack(weight: Tensor, rows: int) -> Tensor:
    """Return a weight as MKL wants it for a number of rows; opaque to torch.

    Args:
        weight: float[out, in], row by row.
        rows: Of the matrices that will be multiplied by it.
    """
    return torch.ops.mkl._mkl_reorder_linear_weight.default(weight, rows)


def multiply(rows: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `linear` does, with a weight from `pack` for as many rows.

    Args:
        rows: float[..., in]
        packed: The weight, packed.
        weight: float[out, in]: as it was.
        bias: float[out], or None.

    Returns:
        float[..., out]
    """
    count = rows.numel() // rows.shape[-1]
    return torch.ops.mkl._mkl_linear.default(rows, packed, weight, bias, count)
