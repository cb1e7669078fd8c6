"""Enlarge the weights' columns that large inputs meet, so that rounding hurts them less.

Source: "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", Lin et
al., 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxkit.errors import UnsupportedError
from fxkit.ir.attributes import find_attribute
from fxkit.quantization.algorithms.input_moments import InputMoments, input_moments
from fxkit.quantization.algorithms.scaled_inputs import ScaleInputs
from fxkit.quantization.batches import Batch, inputs_to_capture
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.placement import placements
from fxkit.quantization.preparation import Program, apply, as_config, graph_module_of, graph_of
from fxkit.quantization.specs import QuantizationSpec, TensorSpec
from fxkit.quantization.stored_layers import StoredLayer, stored_layers
from fxkit.quantization.stored_weight import StoredWeight

STEPS = 20
"""How many exponents are tried, as in the paper's code."""


def awq(
    model: Any, config: QuantizationConfig | QuantizationSpec, batches: Iterable[Batch]
) -> Program:
    """Return a program that computes what a model does, whose linear layers can take fewer bits.

    Channels of inputs are divided by a power of their mean magnitude, and columns of weights are
    multiplied by as much; for each input the power is tried that gives the least error of what its
    layers compute with weights as `config` stores them. Layers that have no quantised weight, and
    convolutions, stay. A layer of n inputs takes 8 n² bytes meanwhile. Prepare and convert the
    program with the same config.

    Args:
        model: A module, function, captured program or `torch.fx.GraphModule`.
        config: How weights are going to be quantised; a spec alone holds for all operators.
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
    gm = graph_module_of(program)
    specs = {
        placement.node: operand.spec
        for placement in placements(gm, config)
        for operand in placement.operands
        if operand.is_weight
    }
    shared: dict[str, list[StoredLayer]] = {}
    for layer in stored_layers(gm):
        if layer.operator == "aten.linear":
            shared.setdefault(layer.input, []).append(layer)
    usable = {
        name: layers
        for name, layers in shared.items()
        if all(layer.node in specs for layer in layers)
    }
    layers = [layer for some in usable.values() for layer in some]
    weights = {layer.path: find_attribute(gm, layer.path).detach().double() for layer in layers}
    moments = input_moments(program, layers, batches)
    factors = {}
    for name, some in usable.items():
        first = moments.get(some[0].path)
        if first is not None and first.count:
            made = [(weights[layer.path], specs[layer.node]) for layer in some]
            factors[name] = best_factors(first, made)
    return apply(graph_of(model, *inputs), ScaleInputs(factors))


def best_factors(moments: InputMoments, weights: Sequence[tuple[Tensor, TensorSpec]]) -> Tensor:
    """Return what channels of an input are divided by for the least error, float64[channels].

    Args:
        moments: Of the input.
        weights: Of the layers that take it, float64[out, channels], and how each is stored.
    """
    size = moments.magnitudes[0] / max(moments.count, 1)
    size = size.where(size > 0, size[size > 0].min() if bool((size > 0).any()) else 1.0)
    best, least = torch.ones_like(size), torch.inf
    for step in range(STEPS):
        factors = size.pow(step / STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = 0.0
        for weight, spec in weights:
            stored = StoredWeight.of((weight * factors).float(), 0, spec)
            off = stored.restored() / factors - weight
            error += float(moments.error(off[None]).sum())
        if error < least:
            best, least = factors, error
    return best
