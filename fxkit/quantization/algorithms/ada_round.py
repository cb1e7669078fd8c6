"""Learn for each weight whether to round it up or down.

Source: "Up or Down? Adaptive Rounding for Post-Training Quantization", Nagel et al., 2020, with the
squared error of each layer's products as the loss and the paper's rectified sigmoid.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fxkit.errors import UnsupportedError
from fxkit.quantization.algorithms.weight_choice import (
    WeightChoice,
    WeightProblem,
    choose_weights,
)
from fxkit.quantization.batches import Batch
from fxkit.quantization.preparation import PreparedProgram
from fxkit.quantization.stored_weight import StoredWeight

LOW, HIGH = -0.1, 1.1
"""The sigmoid is stretched to this, and cut at 0 and 1."""
RATE = 0.1
"""Of Adam: larger than the paper's, as the loss is that of all data in each step."""
PRESSURE = 0.1
"""How much the term that pushes towards 0 and 1 weighs against the mean error."""
WARM_UP = 0.2
"""The share of steps before that term is there."""
BETAS = 20.0, 2.0
"""Its exponent at first and at last."""


def ada_round(
    prepared: PreparedProgram, batches: Iterable[Batch], *, steps: int = 500
) -> tuple[WeightChoice, ...]:
    """Choose the integers of weights, each one of the two beside it, so that results lose less.

    It needs a few batches like those that are going to come; the program is run once for each, and
    each weight learns alone, without gradients of the program. A layer of n inputs takes 8 n² bytes
    meanwhile, and a step as long as its product with n rows. Scales stay as they are.

    Args:
        prepared: Gets the integers, which `convert` stores; scales of activations are not needed.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.
        steps: How long each weight learns.

    Returns:
        What was gained, a row for each weight.

    Raises:
        UnsupportedError: When there are no batches or no steps.
    """
    if steps < 1:
        raise UnsupportedError(f"expected at least 1 step, got {steps}")
    return choose_weights(prepared, batches, lambda problem: learnt(problem, steps))


def learnt(problem: WeightProblem, steps: int = 500) -> StoredWeight:
    """Return integers of one weight, up or down from it."""
    weight = problem.matrix
    scale, zeros = problem.steps()
    floor = (weight / scale).floor()
    rest = weight / scale - floor
    limits = problem.spec.low, problem.spec.high
    signal = problem.moments.error(weight).sum()
    second = (problem.moments.second / signal.clamp(min=1e-300) * weight.numel()).float()
    shares = _Shares(rest.float(), steps)
    scale32, start = scale.float(), ((floor + zeros).float(), zeros.float())
    for step in range(steps):
        up = shares.values()
        integers = start[0] + up
        clipped = integers.clamp(*limits)
        off = (clipped - start[1]) * scale32 - weight.float()
        slope = (off @ second) * (2 * scale32) * (integers == clipped)
        shares.move(slope, step)
    up = (shares.values() >= 0.5).double()
    return problem.stored((floor + zeros + up).clamp(*limits))


class _Shares:
    """How far each weight is rounded up, between 0 and 1, learnt by Adam.

    Args:
        rest: What rounding down leaves of each weight, in steps.
        steps: How often they are going to be moved.
    """

    def __init__(self, rest: Tensor, steps: int) -> None:
        self.steps = steps
        inner = ((rest - LOW) / (HIGH - LOW)).clamp(1e-4, 1 - 1e-4)
        self.logits = torch.nn.Parameter(torch.logit(inner))
        self.adam = torch.optim.Adam([self.logits], lr=RATE)

    @property
    def stretched(self) -> Tensor:
        return torch.sigmoid(self.logits.detach()) * (HIGH - LOW) + LOW

    def values(self) -> Tensor:
        return self.stretched.clamp(0, 1)

    def move(self, slope: Tensor, step: int) -> None:
        """Go a step down.

        Args:
            slope: The error's, by each share.
            step: Which one it is.
        """
        wide, at = self.stretched, step / self.steps
        if at >= WARM_UP:
            slope = slope + PRESSURE * _push(wide.clamp(0, 1), (at - WARM_UP) / (1 - WARM_UP))
        sigmoid = (wide - LOW) / (HIGH - LOW)
        inside = (wide > 0) & (wide < 1)
        self.logits.grad = slope * inside * sigmoid * (1 - sigmoid) * (HIGH - LOW)
        self.adam.step()


def _push(share: Tensor, at: float) -> Tensor:
    """Return the slope of 1 - |2 share - 1| ** beta; beta falls from the first to the last one."""
    beta = BETAS[1] + (BETAS[0] - BETAS[1]) * (1 - at)
    away = 2 * share - 1
    return -2 * beta * away.abs().pow(beta - 1) * away.sign()
