"""Judge embeddings: their error against float64, and the neighbours that they put together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Neighbour:
    """A sentence near another one.

    Attributes:
        index: Which sentence it is.
        similarity: Cosine of the angle between the two embeddings.
    """

    index: int
    similarity: float


def reference(module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """Run a copy of the module in float64; the module itself is left alone."""
    with torch.no_grad():
        return copy.deepcopy(module).double()(*inputs)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Return |value - exact| / |exact|, both norms over all elements, computed in float64."""
    exact = exact.double()
    return ((value.double() - exact).norm() / exact.norm()).item()


def nearest(embeddings: Tensor, count: int) -> list[list[Neighbour]]:
    """Return for each row its `count` nearest others, nearest first.

    Args:
        embeddings: float[B, C], rows of length one.
        count: How many; fewer when there are not that many others.
    """
    similarity = (embeddings @ embeddings.T).fill_diagonal_(-float("inf"))
    best = similarity.topk(min(count, len(embeddings) - 1), dim=1)
    return [
        [Neighbour(index, value) for index, value in zip(indices, values, strict=True)]
        for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def same_neighbours(first: list[list[Neighbour]], second: list[list[Neighbour]]) -> int:
    """Count the rows for which both have the same neighbours in the same order."""
    return sum(
        [a.index for a in row] == [b.index for b in other]
        for row, other in zip(first, second, strict=True)
    )
