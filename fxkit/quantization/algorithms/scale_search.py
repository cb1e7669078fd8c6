"""Find scales of weights by the error of what layers multiply, instead of by least and largest.

Source: the search of ranges in "Loss Aware Post-training Quantization", Nahshan et al., 2019, with
the error of each group weighed by the power of the inputs that it meets.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import QuantizationParameters, parameters_of
from fxkit.quantization.algorithms.weight_choice import (
    WeightChoice,
    WeightProblem,
    choose_weights,
)
from fxkit.quantization.batches import Batch
from fxkit.quantization.preparation import PreparedProgram
from fxkit.quantization.stored_weight import StoredWeight, shared_axes


def fit_scales(
    prepared: PreparedProgram,
    batches: Iterable[Batch],
    *,
    steps: int = 24,
    least: float = 0.5,
) -> tuple[WeightChoice, ...]:
    """Choose the scales of weights with which the results of their layers are off by least.

    Ranges from `least` of the largest weight on are tried for each channel or group. It goes before
    `gptq` or `ada_round`, which keep scales. Weights of pair-safe scales keep theirs.

    Args:
        prepared: Gets the weights, which `convert` stores.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.
        steps: How many ranges are tried.
        least: The smallest of them, as a share of the whole.

    Returns:
        What was gained, a row for each weight.

    Raises:
        UnsupportedError: When there are no batches, or `least` is not between 0 and 1.
    """
    if not 0 < least <= 1 or steps < 1:
        raise UnsupportedError(
            f"expected steps and a share above 0 and up to 1, got {steps} and {least}"
        )
    shares = torch.linspace(least, 1.0, steps).tolist()
    return choose_weights(prepared, batches, lambda problem: fitted(problem, shares))


def fitted(problem: WeightProblem, shares: Iterable[float]) -> StoredWeight:
    """Return a weight with the best scale of each part; cost: that of quantising it so often."""
    spec, start = problem.spec, problem.start
    if spec.is_pair_safe:
        return start
    weight = problem.weight.detach().double()
    power = problem.moments.second.diagonal(dim1=-2, dim2=-1)[:, None, :].sqrt()
    weights = problem.layer.weight(power.expand_as(problem.matrix))
    groups = (lambda t: t.unflatten(1, (-1, spec.group_size))) if spec.group_size else (lambda t: t)
    parts = groups(weight)
    others = shared_axes(parts.ndim, start.axis, spec)
    low, high = parts.amin(others), parts.amax(others)
    best: tuple[Tensor, QuantizationParameters] | None = None
    for share in shares:
        found = parameters_of(low * share, high * share, spec)
        stored = StoredWeight.within(problem.weight, start.axis, spec, found)
        difference = groups((stored.restored() - weight) * weights)
        error = difference.square().sum(others)
        if best is None:
            best = error, found
            continue
        gains = error < best[0]
        scale = found.scale.where(gains, best[1].scale)
        zeros = found.zero_point.where(gains, best[1].zero_point)
        best = error.minimum(best[0]), QuantizationParameters(scale, zeros)
    return start if best is None else StoredWeight.within(problem.weight, start.axis, spec, best[1])
