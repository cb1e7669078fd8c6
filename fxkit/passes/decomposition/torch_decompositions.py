"""Torch's decompositions into the core set: the one place that knows where torch keeps them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fxkit.passes.decomposition.core_operators import is_core
from fxkit.passes.decomposition.grouped_matmul import grouped_matmul
from fxkit.passes.decomposition.recording import WritesInPlace
from fxkit.passes.decomposition.recurrent_layers import recurrent_layers
from fxkit.passes.decomposition.special_functions import special_functions
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters.decompositions import core_table, whole_table
from fxkit.torch_adapters.operators import can_decompose, grouped_product_overload, schema_of


def expansion_of(overload: Any) -> Callable[..., Any] | None:
    """Return the function that computes an operator from others; None for one of the core set.

    Raises:
        WritesInPlace: When it writes.
        Unrecordable: When torch has no decomposition of it.
    """
    if schema_of(overload).is_mutable:  # `copy_` too, which is for the end of a graph
        raise WritesInPlace(f"{overload} writes")
    if is_core(overload):
        return None
    for table in (_own_table(), _core_table()):
        if overload in table:
            return table[overload]
    if can_decompose(overload):
        return overload.decompose
    if overload in _whole_table():
        return _whole_table()[overload]
    raise Unrecordable(f"torch has no decomposition of {overload}")


def computation_of(overload: Any) -> Callable[..., Any]:
    """Return what to run to see how an operator is computed: mostly the operator itself."""
    found = _own_table().get(overload)
    return overload if found is None else found


_core_table = functools.cache(core_table)
_whole_table = functools.cache(whole_table)


@functools.cache
def _own_table() -> dict[Any, Callable[..., Any]]:
    """Return what torch decomposes into something that writes, or not at all."""
    aten, prims = torch.ops.aten, torch.ops.prims
    grouped = grouped_product_overload()
    return {
        aten.native_batch_norm.default: _batch_norm,
        aten.cudnn_batch_norm.default: _batch_norm,
        aten.rms_norm.default: _rms_norm,
        aten.adaptive_avg_pool2d.default: _adaptive_average,
        aten.pad.default: _pad,
        aten._pad_circular.default: _pad_circular,
        **recurrent_layers(),
        **special_functions(),
        **({} if grouped is None else {grouped: grouped_matmul}),
        aten.var_mean.default: _var_mean_of_all,
        aten.var_mean.dim: _var_mean_by_bias,
        aten.var_mean.correction: _var_mean,
        aten._embedding_bag_forward_only.default: aten._embedding_bag.default,
        aten.empty_permuted.default: _empty_permuted,
        aten.lift_fresh.default: lambda x: aten.alias.default(x),
        aten.lift_fresh_copy.default: aten.clone.default,
        aten._reshape_alias.default: lambda x, size, stride: aten.view.default(x, size),
        aten._unsafe_view.default: lambda x, size: aten.view.default(x, size),
        aten.diagonal_scatter.default: _diagonal_scatter,
        aten.fmax.default: functools.partial(_without_nans, aten.maximum.default),
        aten.fmin.default: functools.partial(_without_nans, aten.minimum.default),
        aten.round.decimals: _round,
        aten.histc.default: _histc,
        aten.max.default: lambda x: aten.amax.default(x, []),
        aten.min.default: lambda x: aten.amin.default(x, []),
        aten.addbmm.default: _addbmm,
        aten._conj.default: aten.conj_physical.default,
        aten._conj_physical.default: aten.conj_physical.default,
        prims.copy_strided.default: lambda x, stride: aten.clone.default(x),
        prims.convert_element_type.default: lambda x, dtype: aten._to_copy.default(x, dtype=dtype),
    }


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any
) -> Any:
    """Normalise a batch, in the form that suits: with statistics given, or without any."""
    aten = torch.ops.aten
    if not training:
        form = aten._native_batch_norm_legit_no_training.default
        return form(x, weight, bias, mean, variance, *rest)
    if mean is None and variance is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, *rest)
    raise Unrecordable("it updates running statistics")


def _empty_permuted(size: list[int], physical_layout: list[int], **options: Any) -> Any:
    """Make an empty tensor whose axes lie in memory in another order."""
    aten = torch.ops.aten
    dense = aten.empty.memory_format([size[axis] for axis in physical_layout], **options)
    back = sorted(range(len(size)), key=physical_layout.__getitem__)
    return aten.permute.default(dense, back)


def _rms_norm(x: Any, shape: list[int], weight: Any = None, eps: float | None = None) -> Any:
    """Divide by the root of the mean square, which torch adds to in place; halves in float32."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    squares = wide.pow(2).mean([-1 - axis for axis in range(len(shape))], keepdim=True)
    normal = wide * torch.rsqrt(squares + eps)
    return (normal if weight is None else normal * weight).to(x.dtype)


def _adaptive_average(x: Any, size: list[int]) -> Any:
    """Pool to windows; to one alone it is a mean, whose strides torch changes in place."""
    if all(wanted == 1 for wanted in size) and 0 not in x.shape:
        aten = torch.ops.aten
        if x.dim() == 3 or not x.is_contiguous(memory_format=torch.channels_last):
            return aten.mean.dim(x, [-1, -2], True)
        batch, channels = x.shape[:2]
        means = aten.view.default(aten.mean.dim(x, [-1, -2]), [batch, 1, 1, channels])
        return aten.permute.default(means, [0, 3, 1, 2])
    return torch.ops.aten._adaptive_avg_pool2d.default(x, size)


def _pad(x: Any, pad: list[int], mode: str = "constant", value: float | None = None) -> Any:
    """Pad a tensor; around in a circle, torch does it by writing."""
    if mode == "circular":
        return _pad_circular(x, pad)
    return torch.ops.aten.pad.default(x, pad, mode, value)


def _pad_circular(x: Any, pad: list[int]) -> Any:
    """Put the end of each axis, the last first, before its start, and its start behind its end."""
    aten = torch.ops.aten
    for position, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = x.dim() - 1 - position
        if min(before, after) < 0:
            x = aten.slice.Tensor(x, axis, max(-before, 0), x.shape[axis] - max(-after, 0))
        size = x.shape[axis]
        start = aten.slice.Tensor(x, axis, 0, max(after, 0))
        end = aten.slice.Tensor(x, axis, size - max(before, 0), size)
        x = aten.cat.default([end, x, start], axis)
    return x


def _diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Write a diagonal, whose axis is the last one of `source`, into rows and columns."""
    aten = torch.ops.aten
    rows, columns = dim1 % x.dim(), dim2 % x.dim()
    order = [rows, columns, *(axis for axis in range(x.dim()) if axis not in (rows, columns))]
    size, starts = source.shape[-1], (max(-offset, 0), max(offset, 0))
    index = [torch.arange(start, start + size, device=x.device) for start in starts]
    first = aten.permute.default(source, [source.dim() - 1, *range(source.dim() - 1)])
    first = first.to(x.dtype)
    written = aten.index_put.default(aten.permute.default(x, order), index, first)
    return aten.permute.default(written, sorted(range(x.dim()), key=order.__getitem__))


def _without_nans(choose: Any, x: Any, other: Any) -> Any:
    """Choose one of two numbers; where one is NaN, the other."""
    dtype = torch.result_type(x, other)
    x, other = x.to(dtype), other.to(dtype)
    if not dtype.is_floating_point:
        return choose(x, other)
    chosen = torch.where(torch.isnan(other), x, choose(x, other))
    return torch.where(torch.isnan(x), other, chosen)


def _round(x: Any, *, decimals: int) -> Any:
    """Round to digits after the point, or in front of it; halves in float32."""
    if not x.dtype.is_floating_point:
        raise Unrecordable(f"torch rounds no {x.dtype} to decimals")
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    power = 10.0 ** abs(decimals)
    if decimals < 0:
        return (torch.round(wide / power) * power).to(x.dtype)
    return (torch.round(wide * power) / power).to(x.dtype)


def _addbmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Add the sum of a batch of products; times zero, what it is added to does not count."""
    total = torch.bmm(a, b).sum(0, dtype=x.dtype)
    total = total if alpha == 1 else total * alpha
    return total if beta == 0 else x * beta + total


def _histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Count numbers by bins of equal width; those outside of the range, and NaN, in none.

    Source: aten/src/ATen/native/cpu/HistogramKernel.cpp
    """
    x = torch.ops.aten.reshape.default(x, [-1])
    low, high = (torch.full((), bound, dtype=x.dtype, device=x.device) for bound in (min, max))
    if min == max:
        if x.shape[0]:
            low, high = x.amin(), x.amax()
        is_single = low == high
        low, high = torch.where(is_single, low - 1, low), torch.where(is_single, high + 1, high)
    is_within = (x >= low) & (x <= high)
    place = torch.where(is_within, (x - low) * bins / (high - low), torch.zeros_like(x))
    place = place.to(torch.int64).clamp(max=bins - 1)
    none = torch.zeros((bins,), dtype=x.dtype, device=x.device)
    return torch.ops.aten.scatter_add.default(none, 0, place, is_within.to(x.dtype))


def _var_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Compute both of what one operator gives."""
    variance = torch.ops.aten.var.correction(x, dim, correction=correction, keepdim=keepdim)
    axes = list(range(x.dim())) if dim is None else dim
    return variance, torch.ops.aten.mean.dim(x, axes, keepdim)


def _var_mean_by_bias(x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _var_mean(x, dim, correction=int(unbiased), keepdim=keepdim)


def _var_mean_of_all(x: Any, unbiased: bool = True) -> Any:
    return _var_mean(x, correction=int(unbiased))
