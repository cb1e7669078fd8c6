"""Rotations of elements of one magnitude: products with them are sums, which stay in float."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(size: int, seed: int = 0) -> Tensor:
    """Return an orthogonal matrix of elements of one magnitude, float64[size, size].

    Args:
        size: A power of two.
        seed: What signs of rows are drawn with.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    drawn = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(seed))
    return matrix * (2 * drawn - 1) / size**0.5


def is_rotation(matrix: Tensor) -> bool:
    """Tell whether a matrix is one of those that `rotation` returns, in whatever type."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        return False
    first = matrix[0].abs()  # of most matrices a row tells
    if not bool(first[0] > 0) or not bool((first == first[0]).all()):
        return False
    if not bool((matrix.abs() == first[0]).all()):
        return False
    signs = matrix.detach().double().sign()
    return torch.equal(signs @ signs.mT, len(matrix) * torch.eye(len(matrix)).to(signs))
