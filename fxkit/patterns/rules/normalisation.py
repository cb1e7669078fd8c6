"""Normalisations that were spelled out by hand, back to the operator they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fxkit.ir.types import TensorType
from fxkit.patterns.conditions import (
    UNKNOWN,
    contiguous,
    every,
    floating,
    is_number,
    no_gradient,
    not_empty,
    shape_of,
)
from fxkit.patterns.language import any_of, computed, operand, optional
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Where, rule


def _last_size(x: Any) -> list[int]:
    """Return the shape that a normalisation over the last axis is given."""
    return list((shape_of(x) or ())[-1:])


def _over_last_axis(*vectors: str) -> Where:
    """Accept x over a last axis of known size, and vectors of that size and dtype."""

    def accept(match: Match) -> bool | str:
        x = match.type("x")
        if not isinstance(x, TensorType) or not x.shape:
            return UNKNOWN
        if not x.dtype.is_floating_point or type(x.shape[-1]) is not int or not x.is_contiguous:
            return f"expected a contiguous floating-point tensor of a fixed last size, got {x}"
        for name in vectors:
            known = match.type(name)
            if not isinstance(known, TensorType):
                return UNKNOWN
            if known.shape != x.shape[-1:] or known.dtype != x.dtype:
                return f"expected {name}: [{x.shape[-1]}] of {x}'s dtype, got {known}"
        return True

    return accept


_EPS = operand(value=lambda eps: is_number(eps) and eps > 0)
_ROWS = {"x": (2, 3, 8), "w": (8,), "b": (8,), "eps": 1e-5, "shape": [8]}


def _mean(x):
    return x.mean(-1, keepdim=True)


@rule(
    at=("aten.div", "aten.mul"),
    where=[_over_last_axis(), {"eps": _EPS}],
    exact=False,
    benefit=3,
    samples=(_ROWS,),
)
def layer_norm_by_hand(x, eps):
    """Each row with its mean taken off, over its standard deviation; in every common spelling.

    `last_size` is that of the last axis.

    Rewrites:
        (x - x.mean(-1, keepdim=True))
            / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + eps)
            →  F.layer_norm(x, last_size, None, None, eps)

    Source: Ba, Kiros and Hinton, Layer Normalization, equation 4.
    """
    centred = x - _mean(x)
    squared = any_of(lambda v: v * v, lambda v: v**2)(centred)
    variance = any_of(
        lambda v: v.var(-1, unbiased=False, keepdim=True),
        lambda v: v.var(-1, correction=0, keepdim=True),
        lambda v: _mean(squared),
    )(x)
    shifted = variance + eps
    normal = any_of(
        lambda v: v / torch.sqrt(shifted),
        lambda v: v * torch.rsqrt(shifted),
        lambda v: v / shifted**0.5,
    )(centred)
    return normal, F.layer_norm(x, computed(_last_size)(x), None, None, eps)


@rule(at="aten.add", where=[_over_last_axis("w", "b")], exact=False, benefit=3, samples=(_ROWS,))
def layer_norm_with_weight(x, w, b, shape, eps):
    """A layer norm that does its own scaling and shifting.

    Rewrites:
        F.layer_norm(x, shape, None, None, eps) * w + b  →  F.layer_norm(x, shape, w, b, eps)
    """
    normal = F.layer_norm(x, shape, None, None, eps)
    return normal * w + b, F.layer_norm(x, shape, w, b, eps)


@rule(
    at=("aten.mul", "aten.div"),
    where=[_over_last_axis(), {"eps": _EPS}],
    exact=False,
    benefit=3,
    samples=(_ROWS,),
)
def rms_norm_by_hand(x, eps):
    """Each row over the root of its mean square; `last_size` is that of the last axis.

    Rewrites:
        x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
            →  F.rms_norm(x, last_size, None, eps)

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, equation 4.
    """
    squared = any_of(lambda v: v * v, lambda v: v**2)(x)
    shifted = _mean(squared) + eps
    normal = any_of(
        lambda v: v * torch.rsqrt(shifted),
        lambda v: v / torch.sqrt(shifted),
        lambda v: v / shifted**0.5,
    )(x)
    return normal, F.rms_norm(x, computed(_last_size)(x), None, eps)


@rule(at="aten.mul", where=[_over_last_axis("w")], exact=False, benefit=3, samples=(_ROWS,))
def rms_norm_with_weight(x, w, shape, eps):
    """A root-mean-square norm that does its own scaling.

    Rewrites:
        F.rms_norm(x, shape, None, eps) * w  →  F.rms_norm(x, shape, w, eps)
    """
    return F.rms_norm(x, shape, None, eps) * w, F.rms_norm(x, shape, w, eps)


_AXIS = {"dim": operand(value=lambda dim: type(dim) is int)}


# Rows with an infinity are NaN in one and not in the other.
@rule(
    at="aten.div",
    where=[floating("x"), contiguous("x"), _AXIS],
    exact=False,
    finite_only=True,
    benefit=3,
    samples=({"x": (3, 4), "dim": -1}, {"x": (2, 5, 3), "dim": 1}),
)
def softmax_by_exp(x, dim):
    """Exponentials over their sum, with or without the largest taken off before.

    Rewrites:
        (e := torch.exp(x)) / e.sum(dim, keepdim=True)  →  torch.softmax(x, dim)
    """
    largest = any_of(
        lambda v: v.amax(dim, keepdim=True),
        lambda v: torch.max(v, dim, keepdim=True)[0],
        lambda v: torch.max(v, dim, keepdim=True).values,
    )(x)
    power = torch.exp(optional(lambda v: v - largest)(x))
    return power / power.sum(dim, keepdim=True), torch.softmax(x, dim)


@rule(
    at=("aten.log", "aten.sub"),
    where=[floating("x"), contiguous("x"), _AXIS],
    exact=False,
    benefit=2,
    samples=({"x": (3, 4), "dim": -1}, {"x": (2, 5, 3), "dim": 1}),
)
def log_softmax_by_softmax(x, dim):
    """The logarithm of a small probability, without losing it to rounding.

    Rewrites:
        torch.log(torch.softmax(x, dim))  →  torch.log_softmax(x, dim)
    """
    return any_of(
        lambda v: torch.log(torch.softmax(v, dim)),
        lambda v: v - torch.logsumexp(v, dim, keepdim=True),
    )(x), torch.log_softmax(x, dim)  # fmt: skip


@rule(
    at="aten.log",
    where=[floating("x"), _AXIS],
    exact=False,
    benefit=2,
    samples=({"x": (3, 4), "dim": -1, "keep": True}, {"x": (2, 5, 3), "dim": 1, "keep": False}),
)
def logarithm_of_summed_exp(x, dim, keep):
    """The logarithm of a sum of exponentials, without overflow.

    Rewrites:
        torch.log(torch.exp(x).sum(dim, keepdim=keep))  →  torch.logsumexp(x, dim, keepdim=keep)
    """
    return torch.log(torch.exp(x).sum(dim, keepdim=keep)), torch.logsumexp(x, dim, keepdim=keep)


def _has_dtype(match: Match) -> bool | str:
    known = match.type("x")
    if not isinstance(known, TensorType):
        return UNKNOWN
    fits = known.dtype == match["dtype"]
    return True if fits else f"the softmax turns {known} into {match['dtype']}"


@rule(at="aten.softmax", where=[_has_dtype, _AXIS], samples=({"dim": -1, "dtype": torch.float32},))
def softmax_in_same_dtype(x, dim, dtype):
    """A softmax that is asked for the dtype that is there already.

    Rewrites:
        torch.softmax(x, dim, dtype=dtype)  →  torch.softmax(x, dim)
    """
    return torch.softmax(x, dim, dtype=dtype), torch.softmax(x, dim)


def _is_half(match: Match) -> bool | str:
    known = match.type("x")
    if not isinstance(known, TensorType):
        return UNKNOWN
    fits = known.dtype == match["dtype"] and known.dtype in (torch.float16, torch.bfloat16)
    return True if fits else f"expected {match['dtype']} to be a half that is there, got {known}"


# torch's kernels compute the softmax of halves in float32 themselves, and round once; but their
# gradient starts from what was rounded.
@rule(
    at="aten.to",
    where=[
        every(no_gradient("x"), _is_half),
        {**_AXIS, "dtype": operand(value=lambda dtype: isinstance(dtype, torch.dtype))},
    ],
    exact=False,
    benefit=6,
    samples=({"dim": -1, "dtype": torch.bfloat16},),
)
def softmax_in_float32(x, dim, dtype):
    """A softmax of halves in float32, rounded to halves afterwards.

    Rewrites:
        torch.softmax(x, dim, dtype=torch.float32).to(dtype=dtype)  →  torch.softmax(x, dim)
    """
    wide = any_of(
        lambda v: torch.softmax(v, dim, dtype=torch.float32),
        lambda v: torch.softmax(v.to(dtype=torch.float32), dim),
    )(x)
    return wide.to(dtype=dtype), torch.softmax(x, dim)


def _counts_axis(match: Match) -> bool | str:
    known, dim = match.type("x"), match["dim"]
    if not isinstance(known, TensorType):
        return UNKNOWN
    size = known.shape[dim] if known.shape else None
    n, share = match.bindings.get("n"), match.bindings.get("share")
    if not isinstance(size, int):
        return f"expected a known size of axis {dim}, got {known}"
    fits = n == size if share is None else size > 0 and share == 1 / size
    return True if fits else f"expected the size of axis {dim} of {known}, got {match}"


# Where the size is a power of two, dividing has become multiplying.
@rule(
    at=("aten.div", "aten.mul"),
    where=[
        every(floating("x"), _counts_axis),
        {**_AXIS, "n": operand(value=is_number), "share": operand(value=is_number)},
    ],
    exact=False,
    benefit=2,
    samples=(
        {"x": (3, 4), "dim": -1, "n": 4, "share": 0.25, "keep": True},
        {"x": (2, 5, 3), "dim": 1, "n": 5, "share": 0.2, "keep": False},
    ),
)
def mean_by_sum(x, dim, n, share, keep):
    """A sum over the size of its axis.

    Rewrites:
        x.sum(dim, keepdim=keep) / n  →  x.mean(dim, keepdim=keep)
    """
    total = x.sum(dim, keepdim=keep)
    return any_of(lambda v: v / n, lambda v: v * share)(total), x.mean(dim, keepdim=keep)


@rule(
    at="aten.mean",
    where=every(floating("x"), not_empty("x")),
    exact=False,
    samples=({"x": (3, 4), "dim": -1, "keep": True},),
)
def variance_by_hand(x, dim, keep):
    """The mean of the squared distances from the mean.

    Rewrites:
        (x - x.mean(dim, keepdim=True)).square().mean(dim, keepdim=keep)
            →  x.var(dim, unbiased=False, keepdim=keep)
    """
    centred = x - x.mean(dim, keepdim=True)
    squared = any_of(lambda v: v * v, torch.square)(centred)
    return squared.mean(dim, keepdim=keep), x.var(dim, unbiased=False, keepdim=keep)
