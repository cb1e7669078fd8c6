"""Gradients of losses that pick a class, spelled out so that kernels take them in.

Source: aten/src/ATen/native/LossNLL.cpp, `nll_loss_backward_out_frame`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MEAN = 1
_TYPES = (torch.float32, torch.float64)


def losses() -> dict[Any, Callable[..., Any]]:
    """Return the table, operator → function that computes it by others."""
    aten = torch.ops.aten
    return {
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
    }


def _nll_loss_backward(
    gradient: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Any:
    """Give each class that was picked its share; torch fills with zeros first, and scatters.

    The forward has raised where a target is no class.
    """
    if scores.dtype not in _TYPES or target.dtype is not torch.int64 or scores.numel() == 0:
        return NotImplemented
    if gradient.dtype is not scores.dtype or not scores.is_contiguous():
        return NotImplemented
    axis = 0 if scores.dim() == 1 else 1
    shape = [-1 if d == axis else 1 for d in range(scores.dim())]
    classes = torch.arange(scores.shape[axis], dtype=torch.int32, device=scores.device)
    picked = target.to(torch.int32).unsqueeze(axis) == classes.view(shape)
    picked = picked & (target != ignore_index).unsqueeze(axis)
    share = -(gradient / total_weight if reduction == _MEAN else gradient)
    share = share.unsqueeze(axis) if share.dim() else share
    if weight is not None:
        share = share * weight.view(shape)
    return torch.where(picked, share, torch.zeros((), dtype=scores.dtype, device=scores.device))
