"""Normalisation by mean and variance: more rows of the table in `reduction_ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable, register_of
from fxkit.lower.operators.reduction_table import Arguments, centred, function, no_dim, row, total


def _normalized_shape(arguments: Arguments, rank: int) -> tuple[int, ...]:
    return tuple(range(rank - len(arguments["normalized_shape"]), rank))


def _from_the_third(arguments: Arguments, rank: int) -> tuple[int, ...]:
    return tuple(range(2, rank))


def _channels(ranks: Mapping[str, int]) -> dict[str, Sequence[int]]:
    """Align parameters with the second dimension."""
    return {name: (1,) for name in ranks if name != "input"}


def _scaled(x: Ref, weight: Ref | None, bias: Ref | None) -> Ref:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _standardised(x: Ref, eps: float, count: int) -> tuple[Ref, Ref, Ref]:
    """Return a row with mean 0 and variance 1, its mean, and what it was scaled by."""
    rest, mean, squares = centred(x, count)
    scale = 1.0 / function("sqrt", squares / count + eps)
    return rest * scale, mean, scale


@row("aten.layer_norm", axes=_normalized_shape, keeps_row=1)
def _layer_norm(input: Ref, weight: Ref | None, bias: Ref | None, *, eps: float, count: int) -> Ref:
    return _scaled(_standardised(input, eps, count)[0], weight, bias)


@row("aten.native_layer_norm", axes=_normalized_shape, keeps_row=1, keeps_dims=True)
def _native_layer_norm(
    input: Ref, weight: Ref | None, bias: Ref | None, *, eps: float, count: int
) -> tuple[Ref, ...]:
    result, mean, scale = _standardised(input, eps, count)
    return _scaled(result, weight, bias), mean, scale


@row("aten.rms_norm", axes=_normalized_shape, keeps_row=1)
def _rms_norm(input: Ref, weight: Ref | None, *, eps: float | None, count: int) -> Ref:
    if eps is None:
        eps = torch.finfo(register_of(input.dtype)).eps
    result = input * (1.0 / function("sqrt", total(input * input) / count + eps))
    return result if weight is None else result * weight


@row("aten.instance_norm", axes=_from_the_third, alignment=_channels, keeps_row=1)
def _instance_norm(
    input: Ref,
    weight: Ref | None,
    bias: Ref | None,
    running_mean: Ref | None,
    running_var: Ref | None,
    *,
    use_input_stats: bool,
    eps: float,
    count: int,
) -> Ref:
    if not use_input_stats:
        raise Unfusable("it normalises by running statistics")
    if running_mean is not None or running_var is not None:
        raise Unfusable("it updates running statistics")
    return _scaled(_standardised(input, eps, count)[0], weight, bias)


@row("aten.batch_norm", axes=no_dim, alignment=_channels, keeps_row=1)
def _batch_norm(
    input: Ref,
    weight: Ref | None,
    bias: Ref | None,
    running_mean: Ref | None,
    running_var: Ref | None,
    *,
    training: bool,
    eps: float,
) -> Ref:
    if training or running_mean is None or running_var is None:
        raise Unfusable("in training it updates running statistics")
    scale = 1.0 / function("sqrt", running_var + eps)
    scale = scale if weight is None else scale * weight
    return _scaled(input - running_mean, scale, bias)
