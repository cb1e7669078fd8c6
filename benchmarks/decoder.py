"""A decoder of random weights: one step of it, by what is kept of the tokens before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Block(nn.Module):
    """Attention over the tokens before and this one, and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.project(self.norm(x)).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        found = F.scaled_dot_product_attention(query, keys, values)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second_norm(x)))), keys, values


class Decoder(nn.Module):
    """A stack of blocks.

    Args:
        layers: How many blocks.
        width: Of a token.
        heads: Of each attention.
    """

    def __init__(self, layers: int = 4, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return what the next token is told by.

        Args:
            x: float[B, 1, width], the token.
            keys: float[layers, B, heads, T, width / heads], of the tokens before.
            values: As `keys`.
        """
        for block, key, value in zip(self.blocks, keys, values, strict=True):
            x, _, _ = block(x, key, value)
        return self.norm(x)


class CachedDecoder(Decoder):
    """A stack of blocks that returns its cache, for the next step."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the next token is told by, and keys and values with this token's.

        Args:
            x: float[B, 1, width], the token.
            keys: float[layers, B, heads, T, width / heads], of the tokens before.
            values: As `keys`.
        """
        kept = []
        for block, key, value in zip(self.blocks, keys, values, strict=True):
            x, key, value = block(x, key, value)
            kept.append((key, value))
        keys, values = (torch.stack(one) for one in zip(*kept, strict=True))
        return self.norm(x), keys, values


def step_inputs(
    layers: int = 4, width: int = 1024, heads: int = 16, tokens: int = 128
) -> tuple[Tensor, ...]:
    """Return a token, and random keys and values of tokens before it."""
    before = (layers, 1, heads, tokens, width // heads)
    return torch.randn(1, 1, width), torch.randn(before), torch.randn(before)
