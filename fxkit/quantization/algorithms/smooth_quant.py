"""Move outliers of activations into the weights that multiply them.

Source: "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
Xiao et al., 2022.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxkit.analysis.objects import graph
from fxkit.errors import UnsupportedError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.observe_values import ObserveValues
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
            if producer.name in self.maxima:
                self._smooth(edit, producer, layers)

    def _smooth(self, edit: EditSession, producer: fx.Node, layers: list[fx.Node]) -> None:
        weights = {layer: _weight(edit.gm, layer) for layer in layers}
        columns = torch.stack([w.detach().abs().amax(0).double() for w in weights.values()])
        largest = self.maxima[producer.name].double()
        factors = largest.pow(self.alpha) / columns.amax(0).pow(1 - self.alpha)
        usable = (largest > 0) & factors.isfinite() & (factors > 0)
        factors = factors.clamp(min=LEAST).where(usable, 1.0)
        with edit.on_behalf_of(layers, "smooth_activations"):
            first = layers[0]
            dtype = weights[first].dtype
            inverse = edit.add_attribute("smoothing", (1 / factors).to(dtype), before=first)
            divided = edit.call(torch.mul, producer, inverse, before=first)
            for layer in layers:
                scaled = (weights[layer].detach().double() * factors).to(dtype)
                read = edit.add_attribute("smoothed_weight", scaled, before=layer)
                old = _operand(layer, "weight")
                self._take(edit, layer, {producer: divided, old: read})
                if not old.users:
                    edit.erase(old)

    def _take(self, edit: EditSession, layer: fx.Node, new: Mapping[fx.Node, fx.Node]) -> None:
        args = map_arg(layer.args, lambda n: new.get(n, n))
        edit.set_args(layer, args, dict(map_arg(layer.kwargs, lambda n: new.get(n, n))))


def groups(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Return the linear layers with stored weights, by the node that makes their input."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph(gm).find(F.linear):
        layer = node.fx_node
        weight, operand = _operand(layer, "weight"), _operand(layer, "input")
        if weight.op == "get_attr" and operand.op != "get_attr" and _weight(gm, layer).ndim == 2:
            found.setdefault(operand, []).append(layer)
    return found


def _operand(layer: fx.Node, name: str) -> Any:
    call = resolve(layer)
    return None if call is None else call.arguments[name]


def _weight(gm: fx.GraphModule, layer: fx.Node) -> Tensor:
    return find_attribute(gm, str(_operand(layer, "weight").target))


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
            observers.setdefault(place.name, MinMaxObserver(axis=-1))(value)

    def is_input(node: Any) -> bool:
        calls = (resolve(user.fx_node) for user in node.users)
        return any(call is not None and call.name == "aten.linear" for call in calls)

    apply(observed, ObserveValues(where=is_input, callback=watch))
    with torch.no_grad():
        for batch in batches:
            call_with(observed, batch)
    ranges = {name: observer.value_range() for name, observer in observers.items()}
    maxima = {
        name: torch.maximum(-seen.low, seen.high)
        for name, seen in ranges.items()
        if not any("not finite" in note for note in seen.notes)
    }
    return apply(graph_of(model, *inputs), SmoothActivations(maxima, alpha))
