"""Round weights one after the other, and let those that follow make up for the error.

Source: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", Frantar
et al., 2022, with the columns in the order of their inputs' power, as the paper's code has it; and
for layers in turn, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", Li
et al., 2025.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fxkit.errors import UnsupportedError
from fxkit.quantization.algorithms.layers_in_turn import choose_in_turn
from fxkit.quantization.algorithms.weight_choice import (
    WeightChoice,
    WeightProblem,
    choose_weights,
    inverse_factor,
)
from fxkit.quantization.batches import Batch
from fxkit.quantization.preparation import PreparedProgram
from fxkit.quantization.stored_weight import StoredWeight

BLOCK = 128
"""Columns whose error is spread at once, as in the paper."""


def gptq(
    prepared: PreparedProgram,
    batches: Iterable[Batch],
    *,
    damping: float = 0.1,
    in_turn: bool = False,
) -> tuple[WeightChoice, ...]:
    """Choose the integers of weights so that the results of their layers are off by less.

    It needs a few batches like those that are going to come; the program is run once for each. A
    layer of n inputs takes 8 n² bytes meanwhile. Scales stay as they are.

    Args:
        prepared: Gets the integers, which `convert` stores; scales of activations are not needed.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.
        damping: Share of the mean power of inputs that is added to that of each. The paper's is
            0.01; few batches want more, or their chances are fitted.
        in_turn: Whether each layer is rounded for what those before it, already rounded, give it,
            and makes up for their errors, too. The program is then run twice with each batch for
            each input of layers.

    Returns:
        What was gained, a row for each weight.

    Raises:
        UnsupportedError: When there are no batches, or `damping` is not positive.
    """
    if not damping > 0:
        raise UnsupportedError(f"expected a positive damping, got {damping}")
    choose = choose_in_turn if in_turn else choose_weights
    return choose(prepared, batches, lambda problem: rounded(problem, damping))


def rounded(problem: WeightProblem, damping: float = 0.1) -> StoredWeight:
    """Return integers of one weight, column by column; cost: cubic in its inputs."""
    second, work = problem.moments.second, problem.matrix.clone()
    scale, zeros = problem.steps()
    order = second.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    columns = order[:, None, :].expand_as(work)
    work, scale, zeros = (one.gather(-1, columns) for one in (work, scale, zeros))
    second = second.gather(-2, order[:, :, None].expand_as(second))
    second = second.gather(-1, order[:, None, :].expand_as(second))
    factor = inverse_factor(second, damping)
    integers = torch.empty_like(work)
    limits = problem.spec.low, problem.spec.high
    for start in range(0, work.shape[-1], BLOCK):
        part = slice(start, start + BLOCK)
        errors = _round_block(
            (work[..., part], scale[..., part], zeros[..., part]),
            integers[..., part],
            factor[..., part, part],
            limits,
        )
        rest = slice(start + BLOCK, None)
        work[..., rest] -= errors @ factor[..., part, rest]
    return problem.stored(torch.empty_like(work).scatter(-1, columns, integers))


def _round_block(
    given: tuple[Tensor, Tensor, Tensor],
    integers: Tensor,
    factor: Tensor,
    limits: tuple[float, float],
) -> Tensor:
    """Round some columns in place, and return their errors for those behind.

    Args:
        given: Weight, scale and zero point of each element, [groups, out, columns]; the weight
            changes.
        integers: What is written.
        factor: Of the inverse of the inputs' second moments, [groups, columns, columns].
        limits: The least and the largest integer.
    """
    work, scale, zeros = given
    errors = torch.empty_like(work)
    for at in range(work.shape[-1]):
        steps = (work[..., at] / scale[..., at]).round() + zeros[..., at]
        integers[..., at] = steps.clamp(*limits)
        kept = (integers[..., at] - zeros[..., at]) * scale[..., at]
        error = (work[..., at] - kept) / factor[:, at, at, None]
        errors[..., at] = error
        work[..., at + 1 :] -= error[..., None] * factor[:, None, at, at + 1 :]
    return errors
