"""What random programs do with a value beyond one pointwise operator: products, pools, norms ..."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

ACTIVATIONS = [torch.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid]
SMALL = [1, 3, 16, 33]


class Call(NamedTuple):
    """An operator, and its arguments after the first."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})


def _like(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(x.dtype)


def products(random: Random, x: torch.Tensor) -> list[Call]:
    """Return products of a value with new matrices, and convolutions over it."""
    width, features = x.shape[-1], random.choice(SMALL)
    other = _like(x, features, width)
    found = [
        Call(F.linear, (other,)),
        Call(F.linear, (other, _like(x, features))),
        Call(torch.matmul, (other.mT.contiguous(),)),
        Call(torch.matmul, (_like(x, width),)),
    ]
    if x.dim() == 2:
        bias = _like(x, features)
        found.append(Call(_addmm, (bias, other.t().contiguous())))
        found.append(Call(torch.mm, (_like(x, width, features),)))
    if x.dim() == 3:
        found.append(Call(torch.bmm, (_like(x, x.shape[0], width, features),)))
        kernel = _like(x, 4, x.shape[1], min(3, width))
        found.append(Call(F.conv1d, (kernel, _like(x, 4), random.randint(1, 2), 1)))
    if x.dim() == 4:
        kernel = _like(x, 4, x.shape[1], min(3, x.shape[2]), min(3, width))
        found.append(Call(F.conv2d, (kernel, None, random.randint(1, 2), 1)))
    return found


def _addmm(x: torch.Tensor, bias: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, other)


def attentions(random: Random, x: torch.Tensor) -> list[Call]:
    """Return attention of a value to new keys, plain, causal and with a mask."""
    length = random.choice([1, 5, 16, 19])
    key, value = (_like(x, *x.shape[:-2], length, x.shape[-1]) for _ in range(2))
    is_visible = torch.rand(x.shape[-2], length) < 0.7
    is_visible[:, 0] = True
    added = _like(x, x.shape[-2], length)
    attend = F.scaled_dot_product_attention
    return [
        Call(attend, (key, value)),
        Call(attend, (key, value), {"is_causal": True}),
        Call(attend, (key, value), {"attn_mask": is_visible}),
        Call(attend, (key, value), {"attn_mask": added, "scale": 0.3}),
    ]


def norms(random: Random, x: torch.Tensor) -> list[Call]:
    """Return the norms that a value's rank allows."""
    last = x.shape[-1]
    found = [
        Call(F.layer_norm, ([last], _like(x, last))),
        Call(F.layer_norm, ([last], _like(x, last), _like(x, last), 1e-3)),
        Call(F.rms_norm, ([last], _like(x, last))),
        Call(F.normalize, (), {"dim": random.randrange(x.dim())}),
    ]
    if x.dim() >= 2:
        found.append(Call(F.layer_norm, (list(x.shape[-2:]),)))
        groups = next(g for g in (3, 2, 1) if x.shape[1] % g == 0)
        scale = _like(x, x.shape[1])
        found.append(Call(F.group_norm, (groups, scale, scale)))
        mean, variance = _like(x, x.shape[1]), _like(x, x.shape[1]).abs() + 0.5
        found.append(Call(F.batch_norm, (mean, variance, scale, scale)))
    if x.dim() >= 3:
        found.append(Call(F.instance_norm))
    return found


def pools(random: Random, x: torch.Tensor) -> list[Call]:
    """Return pools over the last one or two dimensions, and changes of their size."""
    window, step, border = random.randint(2, 3), random.randint(1, 3), random.randint(0, 1)
    found = [
        Call(F.max_pool1d, (window, step, border)),
        Call(F.avg_pool1d, (window, step, border)),
        Call(F.adaptive_avg_pool1d, (random.randint(1, 5),)),
        Call(F.interpolate, (), {"scale_factor": 2.0, "mode": "nearest"}),
    ]
    if x.dim() == 4:
        found += [
            Call(F.max_pool2d, (window, step, border)),
            Call(F.avg_pool2d, (window, step, border)),
            Call(F.adaptive_avg_pool2d, (random.randint(1, 5),)),
            Call(F.interpolate, (), {"scale_factor": 2.0, "mode": "bilinear"}),
        ]
    return found


def several(random: Random, x: torch.Tensor) -> list[Call]:
    """Return calls that give several tensors."""
    dim = random.randrange(x.dim())
    return [
        Call(torch.max, (dim,)),
        Call(torch.min, (dim, True)),
        Call(torch.chunk, (2, dim)),
        Call(torch.split, (random.randint(1, 4), dim)),
        Call(torch.unbind, (dim,)),
        Call(torch.var_mean, (), {"dim": dim}),
        Call(torch.sort, (dim,)),
        Call(torch.aminmax, (), {"dim": dim}),
        Call(torch.topk, (1, dim)),
    ]


def writes(random: Random, x: torch.Tensor) -> list[Call]:
    """Return in-place calls that change a part of a value, or all of it by a mask."""
    dim = random.randrange(x.dim())
    size = x.shape[dim]
    ids = torch.randperm(size)[: random.randint(1, 3)]
    shape = [*x.shape[:dim], len(ids), *x.shape[dim + 1 :]]
    places = ids.reshape(-1, *[1] * (x.dim() - 1)).movedim(0, dim)
    key = (slice(None),) * dim
    return [
        Call(torch.Tensor.masked_fill_, (torch.rand(x.shape) < 0.3, 2)),
        Call(torch.Tensor.index_copy_, (dim, ids, _like(x, *shape))),
        Call(torch.Tensor.index_fill_, (dim, ids, 1)),
        Call(torch.Tensor.scatter_, (dim, places, 3)),
        Call(torch.Tensor.clamp_, (-1, 1)),
        Call(operator.setitem, ((*key, random.randrange(size)), 2)),
        Call(operator.setitem, ((*key, slice(None, None, 2)), -1)),
    ]


def others(random: Random, x: torch.Tensor) -> list[Call]:
    """Return what has no kind of its own: powers, masks, numbers of classes, runs, losses."""
    dim = random.randrange(x.dim())
    found = [
        Call(torch.masked_fill, (torch.rand(x.shape) < 0.5, -1)),
        Call(torch.pow, (random.choice([2, 3]),)),
        Call(torch.clamp, (-2, 1)),
        Call(torch.lerp, (_like(x, *x.shape), 0.3)),
        Call(torch.Tensor.long),
        Call(torch.isnan),
        Call(torch.cummax, (dim,)),
        Call(torch.logcumsumexp, (dim,)),
        Call(torch.take_along_dim, (torch.randint(0, x.shape[dim], x.shape), dim)),
        Call(torch.count_nonzero, (dim,)),
        Call(torch.round),
        Call(torch.fmod, (1.5,)),
        Call(torch.remainder, (2,)),
        Call(torch.atan2, (_like(x, *x.shape),)),
        Call(torch.logaddexp, (_like(x, *x.shape),)),
    ]
    if x.dim() == 2:
        classes = torch.randint(0, x.shape[1], x.shape[:1])
        found += [Call(F.cross_entropy, (classes,)), Call(F.mse_loss, (_like(x, *x.shape),))]
        found += [Call(torch.outer, (x[0],)), Call(torch.cdist, (_like(x, 5, x.shape[1]),))]
    return found
