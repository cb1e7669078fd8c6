"""Choose for each input of linear layers how much of its outliers goes to the weights.

Source: "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
Xiao et al., 2022, with an exponent for each input in place of one for all, tried as in "AWQ", Lin
et al., 2023.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxkit.analysis.objects import GraphNode
from fxkit.errors import UnsupportedError
from fxkit.passes.observe_values import ObserveValues
from fxkit.passes.probes import ProbeSite
from fxkit.quantization.affine import parameters_of, quantized_tensor
from fxkit.quantization.algorithms.input_moments import run_all
from fxkit.quantization.algorithms.scaled_inputs import ScaleInputs, groups, weight_of
from fxkit.quantization.algorithms.smooth_quant import smoothing_factors
from fxkit.quantization.batches import Batch, inputs_to_capture
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.observers.min_max import MinMaxObserver
from fxkit.quantization.placement import QuantizedOperand, placements
from fxkit.quantization.preparation import (
    Program,
    apply,
    as_config,
    graph_module_of,
    graph_of,
)
from fxkit.quantization.specs import QuantizationSpec, TensorSpec
from fxkit.quantization.stored_weight import StoredWeight

ALPHAS = tuple(step / 10 for step in range(11))
ROWS = 64
"""Rows of an input that are kept of each batch, evenly chosen."""


def smooth_for(
    model: Any, config: QuantizationConfig | QuantizationSpec, batches: Iterable[Batch]
) -> Program:
    """Return a program as `smooth_quant` does, each input smoothed as far as `config` gains by it.

    For each input, alphas from 0 to 1 are tried on some rows of it, quantised as `config` says with
    the weights of the layers that take it, and what their results are off by decides; an input that
    does not gain stays as it is. Prepare and convert the program with the same config.

    Args:
        model: A module, function, captured program or `torch.fx.GraphModule`.
        config: What is going to be quantised, and how; a spec alone holds for all operators.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.

    Raises:
        CaptureError: When the model is not one graph.
        UnsupportedError: When there are no batches, or `config` is none.
    """
    config, batches = as_config(config), list(batches)
    if not batches:
        raise UnsupportedError("expected some batches to learn from, got none")
    inputs = inputs_to_capture(batches)
    program = graph_of(model, *inputs)
    sought = {one.name: one for one in _inputs(graph_module_of(program), config)}

    def is_sought(node: GraphNode) -> bool:
        return node.name in sought

    def watch(value: object, place: ProbeSite) -> None:
        if isinstance(value, Tensor) and value.numel():
            sought[place.name].look(value.detach())

    apply(program, ObserveValues(where=is_sought, callback=watch))
    run_all(program, batches)
    found = {name: factors for name, one in sought.items() if (factors := one.best()) is not None}
    return apply(graph_of(model, *inputs), ScaleInputs(found))


@dataclass
class _Input:
    """An input of linear layers, what was seen of it, and how its layers are quantised.

    Attributes:
        name: Name of the node that makes it.
        layers: Weights, float64[out, channels], and how each is stored.
        spec: How the input is quantised, or None.
        observer: Ranges of its channels.
        half: Ranges in every other example: they cut off what they do not know, as ranges that are
            found by calibration do to what comes later.
        rows: Some rows of the examples in between.
        examples: How many there were.
    """

    name: str
    layers: list[tuple[Tensor, TensorSpec]]
    spec: TensorSpec | None
    observer: MinMaxObserver = field(default_factory=lambda: MinMaxObserver(axis=-1))
    half: MinMaxObserver = field(default_factory=lambda: MinMaxObserver(axis=-1))
    rows: list[Tensor] = field(default_factory=list)
    examples: int = 0

    def look(self, values: Tensor) -> None:
        if values.shape[-1] != self.layers[0][0].shape[1]:
            return  # of another graph, where the name is that of something else
        self.observer(values)
        values = values if values.ndim > 1 else values[None]
        first = self.examples % 2
        self.examples += len(values)
        self.half(values[first::2])
        rows = values[1 - first :: 2].reshape(-1, values.shape[-1])
        rows = rows[rows.isfinite().all(-1)]
        if len(rows):
            self.rows.append(rows[:: -(-len(rows) // ROWS)].float())

    def best(self) -> Tensor | None:
        """Return the factors with the least error, float64[channels]; None where none gains."""
        if not self.rows or not self.half.count or self.observer.not_finite:
            return None
        rows, seen = torch.cat(self.rows), self.half.value_range()
        bounds = seen.low, seen.high
        best, least = None, self._error(rows, bounds, torch.ones_like(seen.low))
        for alpha in ALPHAS:
            error = self._error(rows, bounds, self._factors(self.half, alpha))
            if error < least:
                best, least = alpha, error
        return None if best is None else self._factors(self.observer, best)

    def _factors(self, observer: MinMaxObserver, alpha: float) -> Tensor:
        seen = observer.value_range()
        largest = seen.low.abs().maximum(seen.high.abs())
        return smoothing_factors(largest, [weight for weight, _ in self.layers], alpha)

    def _error(self, rows: Tensor, bounds: tuple[Tensor, Tensor], factors: Tensor) -> float:
        taken = self._quantized(rows / factors.float(), *(one / factors for one in bounds))
        total = 0.0
        for weight, spec in self.layers:
            stored = StoredWeight.of((weight * factors).float(), 0, spec).restored().float()
            exact = rows @ weight.float().mT
            noise = (taken @ stored.mT - exact).square().sum(-1)
            power = exact.square().sum(-1)
            total += float((noise / power.clamp(min=1e-30)).where(power > 0, 0).mean())
        return total

    def _quantized(self, rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
        if self.spec is None:
            return rows
        if self.spec.is_dynamic:
            found = parameters_of(rows.amin(-1, True), rows.amax(-1, True), self.spec)
        else:
            found = parameters_of(low.amin(), high.amax(), self.spec)
        integers = quantized_tensor(rows, found, self.spec)
        return (integers.float() - found.zero_point) * found.scale


def _inputs(gm: fx.GraphModule, config: QuantizationConfig) -> list[_Input]:
    """Return the inputs all of whose linear layers store quantised weights."""
    placed = {placement.node: placement.operands for placement in placements(gm, config)}
    found = []
    for producer, layers in groups(gm).items():
        operands = [placed.get(layer.name, ()) for layer in layers]
        weights = [next((o for o in some if o.is_weight), None) for some in operands]
        if all(weights):
            made = [
                (weight_of(gm, layer).detach().double(), weight.spec)
                for layer, weight in zip(layers, weights, strict=True)
                if weight is not None
            ]
            found.append(_Input(producer.name, made, _activation(operands, producer.name)))
    return found


def _activation(operands: Iterable[Iterable[QuantizedOperand]], name: str) -> TensorSpec | None:
    kinds = [o.spec for some in operands for o in some if not o.is_weight and o.producer == name]
    return kinds[0] if kinds else None
