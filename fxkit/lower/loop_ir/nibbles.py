"""Integers of 4 bits, two to a byte: the low half holds the first of two neighbours."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_nibbles(integers: Tensor) -> Tensor:
    """Return integers, two to a byte.

    Args:
        integers: int8[N, K] between -8 and 7, K even.

    Returns:
        int8[N, K / 2].
    """
    low, high = integers[:, ::2], integers[:, 1::2]
    return (low & 15) | (high << 4)


def unpacked_nibbles(packed: Tensor) -> Tensor:
    """Return what `packed_nibbles` was given.

    Args:
        packed: int8[N, K / 2].

    Returns:
        int8[N, K].
    """
    return torch.stack([(packed << 4) >> 4, packed >> 4], -1).flatten(-2)
