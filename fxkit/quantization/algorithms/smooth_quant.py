"""Move outliers of activations into the weights that multiply them.

Source: "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
Xiao et al., 2022.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxkit.errors import UnsupportedError
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.observe_values import ObserveValues
from fxkit.quantization.algorithms.scaled_inputs import divide, groups, weight_of
from fxkit.quantization.batches import Batch, call_with, inputs_to_capture
from fxkit.quantization.observers.min_max import MinMaxObserver
from fxkit.quantization.preparation import Program, apply, graph_of

LEAST = 1e-5
"""The least factor that a channel is divided by, as in the paper's own code."""


@dataclass(frozen=True)
class SmoothActivations(Pass):
    """Divide channels of the input of linear layers, and multiply the weights' columns by as much.

    Linear layers with one input share the factors s = max|x|^alpha / max|w|^(1 - alpha).

    Rewrites:
        %y = aten.linear(%x, %w)  →  %d = aten.mul(%x, 1 / s); %y = aten.linear(%d, %w * s)

    Attributes:
        maxima: float[channels] by the name of the node that makes an input: the largest magnitude
            of each channel.
        alpha: How much of the outliers goes to the weights: 0 none, 1 all.
    """

    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    alpha: float = 0.5

    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rewrite each group of layers whose input was observed. Cost: that of the weights."""
        for producer, layers in groups(edit.gm).items():
            largest = self.maxima.get(producer.name)
            if largest is not None and largest.numel() == weight_of(edit.gm, layers[0]).shape[1]:
                largest = largest.double()
                weights = [weight_of(edit.gm, layer).detach() for layer in layers]
                divide(edit, producer, layers, smoothing_factors(largest, weights, self.alpha))


def smoothing_factors(largest: Tensor, weights: Iterable[Tensor], alpha: float) -> Tensor:
    """Return what each channel of an input is divided by, float64[channels].

    Args:
        largest: float64[channels], the largest magnitudes of the input.
        weights: float[out, channels], of the layers that take it.
        alpha: How much of the outliers goes to the weights.
    """
    columns = torch.stack([weight.abs().amax(0).double() for weight in weights])
    factors = largest.pow(alpha) / columns.amax(0).pow(1 - alpha)
    usable = (largest > 0) & factors.isfinite() & (factors > 0)
    return factors.clamp(min=LEAST).where(usable, 1.0)


def smooth_quant(
    model: Any,
    batches: Iterable[Batch],
    *,
    alpha: float = 0.5,
) -> Program:
    """Return a program that computes what a model does, with smoother inputs of linear layers.

    Prepare and convert it as any other model.

    Args:
        model: A module, function, captured program or `torch.fx.GraphModule`.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.
        alpha: How much of the outliers goes to the weights, between 0 and 1.

    Raises:
        CaptureError: When the model is not one graph.
        UnsupportedError: When there are no batches, or `alpha` is out of bounds.
    """
    batches = list(batches)
    if not batches:
        raise UnsupportedError("expected some batches to find the channels' maxima with, got none")
    if not 0 <= alpha <= 1:
        raise UnsupportedError(f"expected alpha between 0 and 1, got {alpha}")
    inputs = inputs_to_capture(batches)
    observed, observers = graph_of(model, *inputs), {}

    def watch(value: Any, place: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            place = (place.name, value.shape[-1])
            observers.setdefault(place, MinMaxObserver(axis=-1))(value)

    def is_input(node: Any) -> bool:
        calls = (resolve(user.fx_node) for user in node.users)
        return any(call is not None and call.name == "aten.linear" for call in calls)

    apply(observed, ObserveValues(where=is_input, callback=watch))
    with torch.no_grad():
        for batch in batches:
            call_with(observed, batch)
    ranges = {name: observer.value_range() for (name, _), observer in observers.items()}
    maxima = {
        name: torch.maximum(-seen.low, seen.high)
        for name, seen in ranges.items()
        if not any("not finite" in note for note in seen.notes)
    }
    return apply(graph_of(model, *inputs), SmoothActivations(maxima, alpha))
