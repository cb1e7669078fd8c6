"""Batch norms and their gradients, spelled out in sums and pointwise operators.

The kernels then take in what comes before and after: an activation, a residual sum, the gradient of
either. The formulas are those of torch's operators; what those do that is not written here, mixed
types and batches of a single element, stays one call of ATen.

Source: aten/src/ATen/native/Normalization.cpp, `batch_norm_cpu_update_stats_template` and
`batch_norm_backward_cpu_template`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxkit.torch_adapters.fake_tensors import suggested_format

_TYPES = (torch.float32, torch.float64)


def batch_norms() -> dict[Any, Callable[..., Any]]:
    """Return the table, operator → function that computes it by others."""
    aten = torch.ops.aten
    table: dict[Any, Callable[..., Any]] = {
        aten._native_batch_norm_legit_functional.default: _updating,
        aten._native_batch_norm_legit.no_stats: _without_statistics,
        aten._native_batch_norm_legit_no_training.default: _frozen,
        aten.native_batch_norm_backward.default: _backward,
    }
    return table


def _updating(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Normalise; return the result, what the gradient wants, and the new running statistics."""
    if not _is_plain(x, weight, bias, running_mean, running_var):
        return NotImplemented
    if not training:
        frozen = _frozen(x, weight, bias, running_mean, running_var, momentum, eps)
        return *frozen, running_mean, running_var
    moments = _Moments.of(x)
    scale = moments.scale(eps)
    result = _scaled(moments.centred(x), scale, weight, bias)
    variance = moments.squares / (moments.count - 1)
    new_mean = moments.mean * momentum + running_mean * (1 - momentum)
    new_var = variance * momentum + running_var * (1 - momentum)
    return result, moments.mean, scale, new_mean, new_var


def _frozen(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """Normalise by the running statistics, which stay as they are."""
    if not _is_plain(x, weight, bias, running_mean, running_var):
        return NotImplemented
    centred = x - _by_channel(running_mean, x)
    result = _scaled(centred, torch.rsqrt(running_var + eps), weight, bias)
    return result, x.new_empty(0), x.new_empty(0)


def _without_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training or not _is_plain(x, weight, bias):
        return NotImplemented
    moments = _Moments.of(x)
    scale = moments.scale(eps)
    return _scaled(moments.centred(x), scale, weight, bias), moments.mean, scale


def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    scale: Tensor | None,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
) -> Any:
    if not _is_plain(x, gradient, weight, running_mean, running_var):
        return NotImplemented
    if not training:
        if running_mean is None or running_var is None:
            return NotImplemented
        mean, scale = running_mean, torch.rsqrt(running_var + eps)
    if mean is None or scale is None:
        return NotImplemented
    count = x.numel() // x.shape[1]
    axes = _all_but_channels(x)
    centred = x - _by_channel(mean, x)
    shift = gradient.sum(axes)
    slope = (gradient * centred).sum(axes)
    factor = scale if weight is None else scale * weight
    change = gradient
    if training:
        share = slope * scale * scale / count
        change = gradient - _by_channel(shift / count, x) - centred * _by_channel(share, x)
    return (
        _laid_out_for(x, change * _by_channel(factor, x)) if wanted[0] else None,
        slope * scale if wanted[1] else None,
        shift if wanted[2] else None,
    )


def _laid_out_for(x: Tensor, result: Tensor) -> Tensor:
    """Lay a result out as torch's kernels do, which know of contiguous and channels last only."""
    return result.contiguous(memory_format=suggested_format(x))


def _is_plain(x: Tensor, *others: Tensor | None) -> bool:
    """Tell whether all are of one type that kernels compute in, and a variance can be taken."""
    if x.dtype not in _TYPES or x.dim() < 2 or x.numel() <= x.shape[1]:
        return False
    return all(t is None or t.dtype is x.dtype for t in others)


@dataclass(frozen=True)
class _Moments:
    """Sums over each channel.

    Attributes:
        mean: The mean, rounded to the type of the elements.
        rest: What the rounding took from it.
        squares: The sum of the squares of the distances to the mean.
        count: The number of elements.
    """

    mean: Tensor
    rest: Tensor
    squares: Tensor
    count: int

    @classmethod
    def of(cls, x: Tensor) -> _Moments:
        """Sum in float64, as torch does."""
        axes = _all_but_channels(x)
        count = x.numel() // x.shape[1]
        exact = x.sum(axes, dtype=torch.float64) / count
        mean = exact.to(x.dtype)
        rest = exact - mean
        centred = x - _by_channel(mean, x)
        squares = (centred * centred).sum(axes, dtype=torch.float64) - rest * rest * count
        return cls(mean, rest.to(x.dtype), squares.to(x.dtype), count)

    def scale(self, eps: float) -> Tensor:
        """Return the reciprocal deviation."""
        return torch.rsqrt(self.squares / self.count + eps)

    def centred(self, x: Tensor) -> Tensor:
        """Return the distances to the mean, of which the rounding takes nothing."""
        return (x - _by_channel(self.mean, x)) - _by_channel(self.rest, x)


def _scaled(centred: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    result = centred * _by_channel(scale, centred)
    if weight is not None:
        result = result * _by_channel(weight, centred)
    result = result if bias is None else result + _by_channel(bias, centred)
    return _laid_out_for(centred, result)


def _all_but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view([1, -1] + [1] * (x.dim() - 2))
