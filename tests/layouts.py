"""Operators beside those of one loop, with operands in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHAPE = (2, 3, 4, 5)
CHANNELS, ROW = torch.randn(3), torch.randn(5)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "rows turned": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(SHAPE),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}

aten = torch.ops.aten
OPERATORS: dict[Any, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    aten.native_layer_norm.default: lambda x, y: (x, [5], ROW, ROW, 1e-5),
    aten.native_layer_norm_backward.default: lambda x, y: (
        x, y, [5], *(y.mean(-1, keepdim=True) for _ in "ab"), ROW, ROW, [True] * 3,
    ),
    aten.native_batch_norm_backward.default: lambda x, y: (
        x, y, CHANNELS, CHANNELS, CHANNELS, CHANNELS, CHANNELS, True, 1e-5, [True] * 3,
    ),
    aten._native_batch_norm_legit.no_stats: lambda x, y: (x, None, None, True, 0.1, 1e-5),
    aten._native_batch_norm_legit_no_training.default: lambda x, y: (
        x, CHANNELS, CHANNELS, CHANNELS, CHANNELS.abs(), 0.1, 1e-5,
    ),
    aten._native_batch_norm_legit_functional.default: lambda x, y: (
        x, CHANNELS, CHANNELS, CHANNELS, CHANNELS.abs(), True, 0.1, 1e-5,
    ),
    aten._softmax_backward_data.default: lambda x, y: (x, y, -1, x.dtype),
    aten._log_softmax_backward_data.default: lambda x, y: (x, y, -1, x.dtype),
    aten.log_sigmoid_forward.default: lambda x, y: (x,),
    aten.mse_loss_backward.default: lambda x, y: (x, y, x, 0),
    aten.smooth_l1_loss_backward.default: lambda x, y: (x, y, x, 0, 1.0),
    aten.huber_loss_backward.default: lambda x, y: (x, y, x, 0, 1.0),
    aten.glu_backward.default: lambda x, y: (x[:, :, :2], y, 2),
    aten.addcmul.default: lambda x, y: (x, y, x),
    aten.lerp.Tensor: lambda x, y: (x, y, x),
    aten.binary_cross_entropy.default: lambda x, y: (x.sigmoid(), y.sigmoid(), None, 0),
    aten.binary_cross_entropy_backward.default: lambda x, y: (x, y.sigmoid(), x, None, 0),
    aten.hardswish_backward.default: lambda x, y: (x, y),
    aten.logit_backward.default: lambda x, y: (x, y),
    aten.native_dropout_backward.default: lambda x, y: (x, y > 0, 2.0),
    aten.replication_pad2d_backward.default: lambda x, y: (x, y[..., :3], [1, 1, 0, 0]),
    aten.normal.Tensor_Tensor: lambda x, y: (x, y.abs()),
    aten.ldexp.Tensor: lambda x, y: (x, y),
    aten.clone.default: lambda x, y: (x,),
}  # fmt: skip
