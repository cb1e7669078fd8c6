"""What is computed by simpler operators before forward and backward are split and lowered.

Operators that give several results, of which a gradient wants the second and third, are spelled out
so that one kernel computes all of them; gradients that torch has a kernel for are spelled out where
the loops do better. Everything else stays one call of ATen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from fxkit.lower.operators.quantizing_ops import float32_steps
from fxkit.lower.training.batch_norms import batch_norms
from fxkit.lower.training.losses import losses
from fxkit.lower.training.pooling import pooling
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.decompositions import decompositions_of

_FROM_TORCH = (
    *("_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward"),
    *("_fused_rms_norm", "_fused_rms_norm_backward", "glu_backward", "l1_loss", "smooth_l1_loss"),
    *("smooth_l1_loss_backward", "huber_loss", "huber_loss_backward", "mse_loss_backward"),
    *("mse_loss", "rsub", "addcmul", "addcdiv", "lerp", "log_sigmoid_backward", "masked_fill"),
    *("binary_cross_entropy_backward", "soft_margin_loss_backward", "detach", "var_mean"),
)

# Their kernels lay results out contiguous, however their operands lie.
_CONTIGUOUS = (
    *("native_layer_norm", "native_layer_norm_backward", "log_sigmoid_forward"),
    *("_log_softmax_backward_data", "mse_loss_backward", "smooth_l1_loss_backward"),
    *("huber_loss_backward", "glu_backward"),
)


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the table, operator → function that computes it by others."""
    packets = [p for name in _FROM_TORCH if (p := getattr(torch.ops.aten, name, None)) is not None]
    aten = torch.ops.aten
    own = {
        aten.native_layer_norm.default: _layer_norm,
        aten.native_dropout.default: _dropout,
        aten.slice_backward.default: _slice_backward,
        aten.select_backward.default: _select_backward,
        aten.log_sigmoid_forward.default: _log_sigmoid,
        aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantize,
    }
    table = {**decompositions_of(packets), **batch_norms(), **losses(), **pooling(), **own}
    for name in _CONTIGUOUS:
        operator = getattr(aten, name).default
        if operator in table:
            table[operator] = _laid_out_contiguous(table[operator])
    of_entropy = aten.binary_cross_entropy_backward.default
    if of_entropy in table:
        table[of_entropy] = _laid_out_as_second(table[of_entropy])
    return table


def _laid_out_contiguous(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decomposition)
    def computed(*args: Any, **kwargs: Any) -> Any:
        results = decomposition(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, results)

    return computed


def _laid_out_as_second(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decomposition)
    def computed(first: torch.Tensor, second: torch.Tensor, *others: Any) -> Any:
        order = _order(torch.empty_like(second))
        result = decomposition(first, second, *others).permute(order).contiguous()
        return result.permute(_inverse(order))

    return computed


def _layer_norm(
    x: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Any:
    """Normalise; the mean and the reciprocal deviation are the same sums that the result needs."""
    axes = list(range(x.dim() - len(shape), x.dim()))
    if x.numel() == 0 or x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    count = math.prod(shape)
    mean = x.sum(axes, keepdim=True) / count
    centred = x - mean
    scale = torch.rsqrt((centred * centred).sum(axes, keepdim=True) / count + eps)
    result = centred * scale
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result, mean, scale


def _slice_backward(
    gradient: torch.Tensor, sizes: list[int], dim: int, start: int, end: int, step: int
) -> Any:
    """Put zeros around a gradient where a kernel reads it; ATen fills memory first."""
    if step != 1 or gradient.numel() == 0:
        return NotImplemented
    dim %= len(sizes)
    first, last, _ = slice(start, end).indices(sizes[dim])
    return _among_zeros(gradient, dim, first, sizes[dim] - last)


def _select_backward(gradient: torch.Tensor, sizes: list[int], dim: int, index: int) -> Any:
    if gradient.numel() == 0:
        return NotImplemented
    dim %= len(sizes)
    index %= sizes[dim]
    return _among_zeros(gradient.unsqueeze(dim), dim, index, sizes[dim] - index - 1)


def _among_zeros(x: torch.Tensor, dim: int, before: int, after: int) -> Any:
    if x.dim() > 3 and not x.is_contiguous():  # whose result may lie in another order
        return NotImplemented
    borders = [0, 0] * (x.dim() - 1 - dim) + [before, after]
    return torch.ops.aten.constant_pad_nd.default(x, borders, 0)


def _log_sigmoid(x: torch.Tensor) -> Any:
    """Compute it as eager does, and what its gradient may want."""
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    power = torch.exp(-torch.abs(x))
    return torch.clamp_max(x, 0) - torch.log1p(power), power


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Draw the mask as the operator does, and apply it where a kernel can take it in."""
    if train is False or p == 0 or p == 1:
        return NotImplemented
    mask = _drawn(torch.empty_like(x, dtype=torch.bool), 1 - p)
    return x * mask * (1 / (1 - p)), mask


def _fake_quantize(
    x: torch.Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> Any:
    """Quantise as if; the mask says where the gradient passes."""
    if x.dtype != torch.float32:
        return NotImplemented
    step, inverse = float32_steps(scale)
    level = torch.round(x * inverse) + zero_point
    mask = (level >= quant_min) & (level <= quant_max)
    level = torch.where(level > quant_min, level, quant_min)  # the lowest level for NaN too
    return (torch.where(level < quant_max, level, quant_max) - zero_point) * step, mask


def _drawn(like: torch.Tensor, p: float) -> torch.Tensor:
    """Draw a mask in the order in which its elements lie in memory."""
    if like.is_contiguous():
        return torch.ops.aten.bernoulli.p(like, p)
    order = _order(like)
    drawn = torch.ops.aten.bernoulli.p(like.permute(order), p)  # contiguous, as it always is
    return drawn.permute(_inverse(order))


def _order(x: torch.Tensor) -> list[int]:
    """Return the axes in the order in which elements lie in memory."""
    return sorted(range(x.dim()), key=lambda axis: -x.stride(axis))


def _inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]
