"""Put fake quantisation into a graph: what will be integers is rounded as if."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from fxkit.errors import UnsupportedError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.dead_code_elimination import DeadCodeElimination
from fxkit.passes.manager.manager import PassManager
from fxkit.quantization.affine import QuantizationParameters
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.observed_places import ObservedPlaces, keep_identities
from fxkit.quantization.operands import take_instead
from fxkit.quantization.placement import QuantizedOperand, placements
from fxkit.quantization.qat.fake_quantizer import FakeQuantizer, FakeQuantizerOptions
from fxkit.quantization.qat.norms import (
    NormedLayer,
    fold,
    normed_layers,
    of_normed_weight,
    of_plain_weight,
)
from fxkit.quantization.stored_weight import StoredWeight, shared_axes
from fxkit.tracing.symbolic import symbolic_trace

OF_ACTIVATION, OF_WEIGHT = "activation/", "weight/"
"""What names of fake quantisers begin with."""


@dataclass(frozen=True)
class FoldQuantizedNorms(Pass):
    """Fold batch norms into the layers before them whose weights are quantised, and no others.

    Rewrites:
        %c = aten.conv2d(%x, %w); %y = aten.batch_norm(%c, %m, %v, %g, %b)
        →
        %y = aten.conv2d(%x, %conv2d_weight, %conv2d_bias)

    Attributes:
        config: What is quantised.
    """

    config: QuantizationConfig = field(default_factory=lambda: QuantizationConfig(None))

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the norms in order. Cost: that of the weights."""
        keep_identities(edit.graph)
        for pair in normed_layers(edit.graph, placements(edit.gm, self.config)).values():
            fold(edit, pair)


@dataclass(frozen=True)
class InsertFakeQuantizers(Pass):
    """Round operands that are going to be quantised as their integers will be, with gradients.

    The weight of a layer with a batch norm behind is rounded with the norm's running scale folded
    in, as it will be stored. Source: "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", Jacob et al., 2018, section 3.2.

    Rewrites:
        %y = aten.linear(%x, %w)
        →
        %q = fxkit.fake_quantize_moving_range(%x, %low, %high, %momentum, 0, 255, False, None)
        %r = fxkit.fake_quantize_within_itself(%w, -127, 127, True, [1], None, None)
        %y = aten.linear(%q, %r)

    Attributes:
        config: What is quantised, and how.
        quantizers: The fake quantisers: of activations by `activation/` and the names that `places`
            has for what makes them, of weights by `weight/` and their paths; new ones are added.
        ranges: Scales and zero points of activations to begin with, by the names of `places`.
        options: How scales are found.
        places: What nodes are called, in all graphs of a program.
    """

    config: QuantizationConfig = field(default_factory=lambda: QuantizationConfig(None))
    quantizers: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    ranges: Mapping[str, QuantizationParameters] = field(default_factory=dict)
    options: FakeQuantizerOptions = field(default_factory=FakeQuantizerOptions)
    places: ObservedPlaces = field(default_factory=ObservedPlaces)

    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "changed"

    def for_copy(self, memo: dict[int, Any]) -> Pass:
        """Return the pass with fake quantisers of its own."""
        quantizers, places = (copy.deepcopy(it, memo) for it in (self.quantizers, self.places))
        return replace(self, quantizers=quantizers, places=places)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rewrite each operator that is placed. Cost: linear."""
        self.places.begin(edit.gm)
        _Inserter(edit, self).run()


class _Inserter:
    def __init__(self, edit: EditSession, options: InsertFakeQuantizers) -> None:
        self.edit = edit
        self.options = options
        self.placed = placements(edit.gm, options.config)
        options.places.note_operands(edit.gm, self.placed)
        # Ranges were found without gradients.
        self.others = options.places.keys_in_other_mode(edit.gm, self.placed)
        self.nodes: dict[str, fx.Node] = {node.name: node for node in edit.graph.nodes}
        self.normed = normed_layers(edit.graph, self.placed)
        keys = {name: options.places.key_of(node) for name, node in self.nodes.items()}
        folded = {pair.norm.name: keys[name] for name, pair in self.normed.items()}
        self.keys = keys | folded
        self.made: dict[tuple[str, str], fx.Node] = {}

    def run(self) -> None:
        for placement in self.placed:
            node = self.nodes[placement.node]
            with self.edit.on_behalf_of([node], "insert_fake_quantizers"):
                taken = {
                    self.nodes[operand.producer]: self._rounded(node, operand)
                    for operand in placement.operands
                }
            if taken:
                take_instead(self.edit, node, taken)

    def _rounded(self, layer: fx.Node, operand: QuantizedOperand) -> fx.Node:
        """Return what stands for an operand; it is made once for all its users."""
        pair = self.normed.get(layer.name) if operand.is_weight else None
        key = (operand.producer, "" if pair is None else layer.name)
        if key not in self.made:
            producer = self.nodes[operand.producer]
            if pair is not None:
                self.made[key] = self._normed_weight(layer, producer, operand, pair)
            elif operand.is_weight:
                weight = find_attribute(self.edit.gm, str(producer.target)).detach()
                quantizer = self._weight_quantizer(str(producer.target), weight, operand)
                self.made[key] = self._called(quantizer, producer, weight.numel(), layer)
            else:
                known = type_of(producer)
                is_static = isinstance(known, TensorType) and not known.is_symbolic
                count = int(known.numel) if is_static else 1
                quantizer = self._for_activation(producer, operand)
                self.made[key] = self._called(quantizer, producer, count, layer)
        return self.made[key]

    def _for_activation(self, producer: fx.Node, operand: QuantizedOperand) -> FakeQuantizer:
        name = self.keys[producer.name]

        def make() -> FakeQuantizer:
            is_dynamic, options = operand.spec.is_dynamic, self.options.options
            ranges = self.options.ranges
            first = ranges.get(name) or ranges.get(self.others.get(name, name))
            is_new = first is None and not is_dynamic
            if is_new and options.learns_steps:
                raise UnsupportedError(
                    f"expected batches for each branch of the model, got none with %{name}",
                    hint="steps to learn begin with ranges of values: prepare_qat(..., batches=)",
                )
            axes = (-1,) if is_dynamic else ()
            return FakeQuantizer(operand.spec, axes, options, first, waits=is_new)

        return self._known(f"{OF_ACTIVATION}{name}", make)

    def _known(self, name: str, make: Callable[[], FakeQuantizer]) -> FakeQuantizer:
        quantizers = self.options.quantizers
        if name not in quantizers:
            quantizers[name] = make().train(quantizers.training)
        found = quantizers[name]
        assert isinstance(found, FakeQuantizer)
        return found

    def _weight_quantizer(
        self, path: str, weight: Tensor, operand: QuantizedOperand
    ) -> FakeQuantizer:
        def make() -> FakeQuantizer:
            spec, options = operand.spec, self.options.options
            axes = tuple(shared_axes(weight.ndim, operand.axis, spec))
            first = None
            if options.learns_steps:
                first = StoredWeight.of(weight, operand.axis, spec).over_parts()
            return FakeQuantizer(spec, axes, options, first, axis=operand.axis)

        return self._known(f"{OF_WEIGHT}{path}".replace(".", "/"), make)

    def _normed_weight(
        self, layer: fx.Node, read: fx.Node, operand: QuantizedOperand, pair: NormedLayer
    ) -> fx.Node:
        weight = find_attribute(self.edit.gm, str(read.target)).detach()
        variance = find_attribute(self.edit.gm, str(pair.variance.target))
        scale = None if pair.scale is None else find_attribute(self.edit.gm, str(pair.scale.target))
        folded, _ = of_normed_weight(pair.eps, weight.ndim, weight, variance, scale)
        quantizer = self._weight_quantizer(pair.folded, folded.detach(), operand)
        for one in (pair.variance, pair.scale):
            if one is not None and not one < layer:
                self.edit.move(one, before=layer)
        inner, factor = self._spliced(
            partial(of_normed_weight, pair.eps, weight.ndim),
            {"weight": read, "variance": pair.variance, "scale": pair.scale},
            layer,
        )
        rounded = self._called(quantizer, inner, weight.numel(), layer)
        bound = {"rounded": rounded, "factor": factor, "weight": read}
        return self._spliced(of_plain_weight, bound, layer)

    def _called(
        self, quantizer: FakeQuantizer, values: fx.Node, count: int, before: fx.Node
    ) -> fx.Node:
        """Put the node of a fake quantiser before a node, and return it."""
        state = quantizer.state(count)
        path = self.edit.register("fake_quantizer", quantizer) if state else ""
        reads = [self.edit.get_attr(f"{path}.{name}", before=before) for name in state]
        operator, options = quantizer.operator(count)
        return self.edit.call(operator, values, *reads, *options, before=before)

    def _spliced(
        self, formula: Callable[..., Any], bound: Mapping[str, fx.Node | None], before: fx.Node
    ) -> Any:
        """Put the nodes of a formula before a node, and return what it returns."""
        absent = {name: None for name, value in bound.items() if value is None}
        traced = symbolic_trace(partial(formula, **absent) if absent else formula)
        PassManager([DeadCodeElimination()]).run(traced)
        values: dict[fx.Node, Any] = {}
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                values[node] = bound[str(node.target)]
            elif node.op == "output":
                break
            else:
                values[node] = self.edit.copy(node, values.__getitem__, before=before)
        return map_arg(traced.graph.output_node().args[0], values.__getitem__)
