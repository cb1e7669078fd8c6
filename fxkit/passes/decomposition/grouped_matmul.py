"""Products of groups of matrices by products of batches, which the core set has.

A product of groups multiplies each row by the matrix of its group; where groups end is a tensor, so
that no fixed size tells. As core operators every row is multiplied by the matrices of all groups,
and its own product is taken: as many times the work as there are groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxkit.passes.decomposition.unrecordable import Unrecordable


def grouped_matmul(
    a: Tensor,
    b: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply groups of matrices.

    Args:
        a: float[G, M, K]; or of all groups side by side, float[M, K], whose rows belong to groups
            where `b` has three axes, else its columns.
        b: float[G, K, N], or float[K, N].
        ends: int[G], the index behind the last row or column of each group.
        bias: None; others stay.
        out_dtype: That of the operands; others stay.

    Source: aten/src/ATen/native/GroupedMMUtils.h
    """
    if bias is not None or out_dtype not in (None, a.dtype):
        raise Unrecordable("a bias, or another dtype of the result, has no form in core operators")
    if a.dim() == b.dim() == 3:
        return torch.bmm(a, b)
    if ends is None:
        raise Unrecordable("where its groups end is not given")
    if a.dim() == b.dim() == 2:
        is_own = _group_of(a.shape[1], ends) == _numbers(ends.shape[0], ends)[:, None]
        mine = torch.where(is_own[:, None, :], a[None], torch.zeros_like(a)[None])
        return torch.bmm(mine, torch.where(is_own[:, :, None], b[None], torch.zeros_like(b)[None]))
    if a.dim() == 2:
        return _own_rows(torch.bmm(a.expand(b.shape[0], -1, -1), b), ends)
    products = torch.bmm(a, b.expand(a.shape[0], -1, -1))
    return _own_rows(products.transpose(1, 2), ends).transpose(0, 1).contiguous()


def _own_rows(products: Tensor, ends: Tensor) -> Tensor:
    """Take each row [T, N] from the products [G, T, N] with the matrix of its group."""
    groups, rows = products.shape[:2]
    group = _group_of(rows, ends).clamp(max=groups - 1)
    return products[group, _numbers(rows, ends)]


def _group_of(rows: int, ends: Tensor) -> Tensor:
    """Return the group of each row: how many end before it."""
    return (_numbers(rows, ends)[:, None] >= ends).sum(1)


def _numbers(count: int, like: Any) -> Tensor:
    return torch.arange(count, device=like.device)
