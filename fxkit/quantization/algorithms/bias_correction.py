"""Give back to biases what quantisation shifts the mean of results by.

Source: "Data-Free Quantization Through Weight Equalization and Bias Correction", Nagel et al.,
2019, section 4.2, with means of inputs from batches (the appendix's empirical correction).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from fxkit.ir.attributes import find_attribute
from fxkit.quantization.affine import QuantizationParameters, parameters_of, quantized_tensor
from fxkit.quantization.algorithms.input_moments import run_all
from fxkit.quantization.algorithms.watch_inputs import Look, WatchInputs
from fxkit.quantization.batches import Batch
from fxkit.quantization.placement import QuantizedOperand, placements
from fxkit.quantization.preparation import PreparedProgram, apply
from fxkit.quantization.specs import TensorSpec
from fxkit.quantization.stored_layers import StoredLayer


@dataclass(frozen=True)
class CorrectedBias:
    """What was found for one layer.

    Attributes:
        layer: Name of its node.
        shift: Root mean square, over channels, of what the means of its results are off by.
    """

    layer: str
    shift: float


def correct_biases(
    prepared: PreparedProgram, batches: Iterable[Batch]
) -> tuple[CorrectedBias, ...]:
    """Find by how much quantisation shifts the mean of each channel of layers, and take it back.

    Rounding shifts means where few weights are summed, as in depthwise convolutions, and where
    inputs are not centred. It needs a calibrated program and a few batches; the program is run once
    for each. Do it last: integers that other algorithms choose are those that are corrected for.

    Args:
        prepared: Gets the corrections, which `convert` adds to biases.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.

    Returns:
        What was found, a row for each layer.

    Raises:
        UnsupportedError: When there are no batches.
    """
    means: dict[tuple[str, str], _Means] = {}

    def watch(gm: fx.GraphModule, layers: Sequence[StoredLayer]) -> Look | None:
        watched = []
        for one in _means(prepared, gm, layers):
            place = one.layer.node, one.layer.path
            watched.append(means.setdefault(place, one))  # another graph may have the same layer

        def show(value: Tensor) -> None:
            for one in watched:
                one.add(value)

        return show if watched else None

    program = prepared.remake()
    apply(program, WatchInputs(watch))
    run_all(program, batches)
    found = {place: one.shift() for place, one in means.items() if one.count}
    prepared.choices.biases.update(found)
    return tuple(
        CorrectedBias(name, float(shift.square().mean().sqrt()))
        for (name, _), shift in found.items()
    )


@dataclass
class _Means:
    """Means of what a layer multiplies, in float and as it will be quantised.

    Attributes:
        layer: The layer.
        weights: Its weight in float and as it is stored, float64[groups, out, in] each.
        spec: How its input will be quantised, or None.
        found: Scale and zero point of a static input.
        count: How many rows were seen.
        sums: Sums of rows in float and as they are quantised, float64[groups, in] each.
    """

    layer: StoredLayer
    weights: tuple[Tensor, Tensor]
    spec: TensorSpec | None
    found: QuantizationParameters | None
    count: int = 0
    sums: tuple[Tensor, Tensor] | None = None

    def add(self, values: Tensor) -> None:
        """Add the rows of an input, unless one is not finite."""
        rows = self.layer.rows(values).double()
        sums = rows.sum(1), self.layer.rows(self._quantized(values)).double().sum(1)
        if not all(bool(one.isfinite().all()) for one in sums):
            return
        self.count += rows.shape[1]
        kept = self.sums or (0, 0)
        self.sums = sums[0] + kept[0], sums[1] + kept[1]

    def shift(self) -> Tensor:
        """Return what has to be added to results, float64[channels]."""
        assert self.sums is not None
        exact, quantized = (
            (weight @ (total / self.count)[..., None]).reshape(-1)
            for weight, total in zip(self.weights, self.sums, strict=True)
        )
        return exact - quantized

    def _quantized(self, values: Tensor) -> Tensor:
        if self.spec is None:
            return values
        found = self.found
        if found is None:
            found = parameters_of(values.amin(-1, True), values.amax(-1, True), self.spec)
        integers = quantized_tensor(values, found, self.spec)
        return (integers.double() - found.zero_point) * found.scale.double()


def _means(
    prepared: PreparedProgram, gm: fx.GraphModule, layers: Sequence[StoredLayer]
) -> list[_Means]:
    placed = {placement.node: placement.operands for placement in placements(gm, prepared.config)}
    nodes = {node.name: node for node in gm.graph.nodes}
    found = []
    for layer in layers:
        operands = placed.get(layer.node, ())
        weight = find_attribute(gm, layer.path).detach()
        stored = next((o for o in operands if o.is_weight), None)
        if stored is None:
            continue
        chosen = prepared.choices.stored(layer.path, weight, stored.axis, stored.spec)
        weights = layer.matrix(weight.double()), layer.matrix(chosen.restored())
        spec, numbers = _of_input(prepared, nodes[layer.input], operands)
        found.append(_Means(layer, weights, spec, numbers))
    return found


def _of_input(
    prepared: PreparedProgram, producer: fx.Node, operands: Iterable[QuantizedOperand]
) -> tuple[TensorSpec | None, QuantizationParameters | None]:
    """Return how the input of a layer will be quantised, and with which numbers."""
    for operand in operands:
        if operand.is_weight or operand.producer != producer.name:
            continue
        observer = prepared.observers.get(prepared.places.key_of(producer))
        if observer is None or not observer.count:
            return (operand.spec, None) if operand.spec.is_dynamic else (None, None)
        seen = observer.value_range()
        return operand.spec, parameters_of(seen.low, seen.high, operand.spec)
    return None, None
