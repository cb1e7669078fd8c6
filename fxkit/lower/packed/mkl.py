"""The calls of torch that give MKL a weight which was packed before: all that is private."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Names of the operators → how many arguments they take in the versions that are known.
_CALLS = {"_mkl_linear": 5, "_mkl_reorder_linear_weight": 2}


@functools.cache
def is_available() -> bool:
    """Tell whether torch has been built with MKL, and with what packs weights for it."""
    if not torch.backends.mkl.is_available():
        return False
    return all(_argument_count(name) == count for name, count in _CALLS.items())


def _argument_count(name: str) -> int:
    found = getattr(getattr(torch.ops.mkl, name, None), "default", None)
    return 0 if found is None else len(found._schema.arguments)


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
