"""Weights of 8-bit integers in the order in which processors multiply them.

A panel has 64 columns. It begins with 64 sums of its columns, then 16 words of which the first
tells whether the products of pairs by unsigned bytes fit into 16 bits, then its integers:
int8[depth / 4][64][4]. Columns that are not there are 0, and so are terms up to a multiple of 64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# FX_PANEL_COLUMNS and FX_PANEL_HEAD in the text; what terms are filled up to.
COLUMNS, HEAD, _TERMS = 64, 320, 64

# What a pair of integers may add up to: times 255, that fits into 16 bits.
_MOST_OF_A_PAIR = 128


def panel_bytes(depth: int) -> int:
    """Return how many bytes a panel takes."""
    return HEAD + -(-depth // _TERMS) * _TERMS * COLUMNS


def in_panels(weight: Tensor) -> Tensor:
    """Return a weight in panels.

    Args:
        weight: int8[N, K].

    Returns:
        uint8[N / 64, bytes of a panel].
    """
    columns, depth = weight.shape
    full = F.pad(weight, (0, -depth % _TERMS, 0, -columns % COLUMNS))
    panels = full.shape[0] // COLUMNS
    sums = full.sum(1, dtype=torch.int32).reshape(panels, COLUMNS)
    tells = torch.zeros(panels, (HEAD - 4 * COLUMNS) // 4, dtype=torch.int32)
    tells[:, 0] = _fit_in_pairs(full).reshape(panels, COLUMNS).all(1)
    words = full.contiguous().view(torch.int32).reshape(panels, COLUMNS, -1).transpose(1, 2)
    return torch.cat([sums, tells, words.reshape(panels, -1)], 1).view(torch.uint8)


def _fit_in_pairs(weight: Tensor) -> Tensor:
    """Tell of each row whether its pairs, each times an unsigned byte, fit into 16 bits."""
    pairs = weight.view(torch.int16)
    low, high = (pairs << 8) >> 8, pairs >> 8  # little endian
    above = low.clamp(min=0) + high.clamp(min=0)
    below = low.clamp(max=0) + high.clamp(max=0)
    return (above.amax(1) <= _MOST_OF_A_PAIR) & (below.amin(1) >= -_MOST_OF_A_PAIR)


def unpacked(packed: Tensor, depth: int, columns: int) -> Tensor:
    """Return the weight that `in_panels` made panels of: int8[columns, depth]."""
    panels = -(-columns // COLUMNS)
    words = packed.reshape(panels, -1)[:, HEAD:].contiguous().view(torch.int32)
    words = words.reshape(panels, -1, COLUMNS).transpose(1, 2).contiguous()
    return words.reshape(panels * COLUMNS, -1).view(torch.int8)[:columns, :depth]
