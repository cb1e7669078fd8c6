"""Put quantise and dequantise nodes where observers were, and integers where weights were."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx, nn

from fxkit.errors import UnsupportedError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.provenance import module_stack
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.stored_nibbles import unpack_calls
from fxkit.lower.loop_ir.nibbles import packed_nibbles
from fxkit.passes.base import Pass, PassContext
from fxkit.quantization.affine import QuantizationParameters, parameters_of
from fxkit.quantization.biases import correct_bias
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.observed_places import ObservedPlaces
from fxkit.quantization.operands import drop_unread, take_instead
from fxkit.quantization.placement import QuantizedOperand, placements
from fxkit.quantization.preparation import (
    PreparedProgram,
    Program,
    apply,
    as_prepared,
    graph_module_of,
    model_of,
)
from fxkit.quantization.qat.qat_program import QatProgram
from fxkit.quantization.quantization_choices import QuantizationChoices
from fxkit.quantization.specs import TensorSpec
from fxkit.quantization.state_values import StateValues, state_values
from fxkit.quantization.stored_layers import stored_path
from fxkit.quantization.stored_weight import StoredWeight
from fxkit.torch_adapters.quantized_operators import quantized_operators

# Torch computes these in one call where no gradient is asked for.
_WITH_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class QuantizeOperands(Pass):
    """Let operators take operands that were quantised and dequantised: the reference graph.

    Rewrites:
        %y = aten.linear(%x, %w)
        →
        %q = quantized_decomposed.quantize_per_tensor(%x, 0.02, 128, 0, 255, torch.uint8)
        %d = quantized_decomposed.dequantize_per_tensor(%q, 0.02, 128, 0, 255, torch.uint8)
        %v = quantized_decomposed.dequantize_per_channel(%wq, %s, %z, 0, -127, 127, torch.int8)
        %y = aten.linear(%d, %v)

        %y = aten.linear(%x, %w)
        →
        %f = aten.to(%wq, torch.float32); %v = aten.mul(%f, %s); %y = aten.linear(%x, %v)

        The second form is that of weights that are stored as float8; those of bfloat16 have no %s.

    Attributes:
        config: What is quantised, and how.
        ranges: Scale and zero point of activations, by the names that `places` has for what makes
            them.
        places: Where observers look.
        choices: Integers and corrections of biases that algorithms chose.
    """

    config: QuantizationConfig = field(default_factory=lambda: QuantizationConfig(None))
    ranges: Mapping[str, QuantizationParameters] = field(default_factory=dict)
    places: ObservedPlaces = field(default_factory=ObservedPlaces)
    choices: QuantizationChoices = field(default_factory=QuantizationChoices)

    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "changed"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rewrite each operator that is placed. Cost: linear, and that of reading the weights."""
        keys = {node.name: self.places.key_of(node) for node in edit.graph.nodes}
        found = {name: self.ranges[key] for name, key in keys.items() if key in self.ranges}
        converter = _Converter(edit, found, self.choices)
        converter.run(self.config)
        if converter.unseen:
            nodes = ", ".join(f"%{name}" for name in converter.unseen)
            context.notes.append(f"{nodes} stay in float: calibration never met what they take")
            warnings.warn(
                f"expected activations that calibration has met, got new ones at {nodes}: they "
                "stay in float, in a graph that was captured for other inputs.\n"
                f"  hint: {_how_to_meet(converter)}",
                stacklevel=2,
            )


def _how_to_meet(converter: _Converter) -> str:
    """Say how calibration meets what it has not: torch may have computed it in one call there."""
    around = [kind for n in converter.unseen for _, kind in module_stack(converter.nodes[n])]
    if any(isinstance(kind, type) and issubclass(kind, _WITH_FAST_PATHS) for kind in around):
        return (
            "torch.backends.mha.set_fastpath_enabled(False) from prepare on, so that attention is "
            "computed by the same layers with gradients and without; or calibrate with such inputs"
        )
    return "calibrate with such inputs, too"


class _Converter:
    def __init__(
        self,
        edit: EditSession,
        ranges: Mapping[str, QuantizationParameters],
        choices: QuantizationChoices,
    ) -> None:
        self.edit = edit
        self.ranges = ranges
        self.choices = choices
        self.ops = quantized_operators()
        self.nodes = {node.name: node for node in edit.graph.nodes}
        self.made: dict[QuantizedOperand, fx.Node] = {}
        self.late_place = _after_inputs(edit.graph)
        self.unseen: list[str] = []

    def run(self, config: QuantizationConfig) -> None:
        decided = placements(self.edit.gm, config)
        for state in state_values(self.edit.gm, config.state):
            self._state(state, config.state_spec)
        for placement in decided:
            node = self.nodes[placement.node]
            missing = [
                operand.producer
                for operand in placement.operands
                if not operand.is_weight
                and not operand.spec.is_dynamic
                and operand.producer not in self.ranges
            ]
            if missing:  # a graph for other inputs, with a node that calibration never met
                self.unseen.append(node.name)
                continue
            with self.edit.on_behalf_of([node], "quantize_operands"):
                taken = {self.nodes[o.producer]: self._operand(o) for o in placement.operands}
            if taken:
                path = stored_path(node)
                take_instead(self.edit, node, taken)
                self._correct(node, path)
        reads = dict.fromkeys(self.nodes[one.producer] for one in self.made if one.is_weight)
        for read in reads:
            if not read.users:
                self.edit.erase(read)
                drop_unread(self.edit, str(read.target))

    def _state(self, state: StateValues, spec: TensorSpec) -> None:
        """Round a state where it comes in, and the new values where they enter it."""
        nodes = [state.input, *state.entering]
        if any(node.name not in self.ranges for node in nodes):
            self.unseen.append(state.input.name)
            return
        for node in nodes:
            with self.edit.on_behalf_of([node], "quantize_operands"):
                rounded = self._operand(QuantizedOperand(node.name, spec))
            for user in list(node.users):
                if state.is_rounded_for(user, node):
                    take_instead(self.edit, user, {node: rounded})

    def _correct(self, layer: fx.Node, path: str | None) -> None:
        """Add what was chosen to the bias of a layer, or to its result where it takes no bias."""
        added = None if path is None else self.choices.biases.get((layer.name, path))
        if added is None:
            return
        with self.edit.on_behalf_of([layer], "quantize_operands"):
            correct_bias(self.edit, layer, added)

    def _operand(self, operand: QuantizedOperand) -> fx.Node:
        """Return what stands for an operand; it is made once for all its users."""
        if operand not in self.made:
            producer = self.nodes[operand.producer]
            make = self._weight if operand.is_weight else self._activation
            self.made[operand] = make(producer, operand)
        return self.made[operand]

    def _activation(self, producer: fx.Node, operand: QuantizedOperand) -> fx.Node:
        spec, known = operand.spec, type_of(producer)
        dtype = known.dtype if isinstance(known, TensorType) else torch.float32
        bounds = (spec.low, spec.high, spec.dtype)
        after = _Chain(self.edit, producer)
        if spec.is_dynamic:
            is_affine = spec.scheme == "affine"
            choose = self.ops.choose_qparams_per_token_asymmetric.default
            choose = choose if is_affine else self.ops.choose_qparams_per_token.default
            chosen = after.call(choose, producer, spec.dtype)
            scales = after.call(operator.getitem, chosen, 0)
            zeros = after.call(operator.getitem, chosen, 1)
            quantise = self.ops.quantize_per_token.default
            integers = after.call(quantise, producer, scales, zeros, *bounds)
            dequantise = self.ops.dequantize_per_token.default
            return after.call(dequantise, integers, scales, zeros, *bounds, dtype)
        found = self.ranges[operand.producer]
        numbers = (float(found.scale), int(found.zero_point))
        integers = after.call(self.ops.quantize_per_tensor.default, producer, *numbers, *bounds)
        keywords = {} if dtype == torch.float32 else {"out_dtype": dtype}
        dequantise = self.ops.dequantize_per_tensor.default
        return after.call(dequantise, integers, *numbers, *bounds, **keywords)

    def _weight(self, read: fx.Node, operand: QuantizedOperand) -> fx.Node:
        weight = find_attribute(self.edit.gm, str(read.target)).detach()
        spec, name = operand.spec, str(read.target).replace(".", "_")
        stored = self.choices.stored(str(read.target), weight, operand.axis, spec)
        integers, is_window = stored.integers, _is_window(stored)
        if stored.is_packed:
            integers = packed_nibbles(integers)
        elif is_window:
            integers = integers.movedim(1, -1).contiguous()
        place = self.late_place.get(read, read)
        if spec.is_float:
            return self._float(stored, weight.dtype, name, place)
        first = self.edit.add_attribute(f"{name}_quantized", integers, before=place)
        after = _Chain(self.edit, first)
        bounds = (spec.low, spec.high, spec.dtype)
        whole = first
        if stored.is_packed:
            whole = unpack_calls(after.call, first)
        elif is_window:
            axes = (0, -1, *range(1, integers.ndim - 1))
            whole = after.call(torch.ops.aten.permute.default, first, axes)
        if is_window and weight.is_contiguous():
            # Results of ATen's convolutions would have their channels innermost, as their weight.
            clone = torch.ops.aten.clone.default
            whole = after.call(clone, whole, memory_format=torch.contiguous_format)
        if spec.granularity == "per_tensor":
            found = stored.parameters
            return after.call(
                self.ops.dequantize_per_tensor.default,
                whole, float(found.scale), int(found.zero_point), *bounds,
                **({} if weight.dtype == torch.float32 else {"out_dtype": weight.dtype}),
            )  # fmt: skip
        scales = self.edit.add_attribute(f"{name}_scale", stored.parameters.scale, before=first)
        zeros = None
        if spec.scheme == "affine":
            found = stored.parameters.zero_point
            found = found.to(torch.int8) if stored.is_packed else found
            zeros = self.edit.add_attribute(f"{name}_zero_point", found, before=first)
        if spec.granularity == "per_group":
            target = self.ops.dequantize_per_channel_group.default
            size = spec.group_size
            return after.call(target, whole, scales, zeros, *bounds, size, weight.dtype)
        target = self.ops.dequantize_per_channel.default
        keywords = {} if weight.dtype == torch.float32 else {"out_dtype": weight.dtype}
        return after.call(target, whole, scales, zeros, operand.axis, *bounds, **keywords)

    def _float(
        self, stored: StoredWeight, dtype: torch.dtype, name: str, place: fx.Node
    ) -> fx.Node:
        """Return what makes a weight of a type of floats of fewer bits."""
        to, scale = torch.ops.aten.to.dtype, stored.over_parts().scale
        first = self.edit.add_attribute(f"{name}_quantized", stored.integers, before=place)
        after = _Chain(self.edit, first)
        wide = after.call(to, first, torch.float32)
        if stored.spec.granularity == "per_channel":
            scales = self.edit.add_attribute(f"{name}_scale", scale, before=first)
            wide = after.call(torch.ops.aten.mul.Tensor, wide, scales)
        elif stored.spec.has_scale:
            wide = after.call(torch.ops.aten.mul.Tensor, wide, float(scale))
        return wide if dtype == torch.float32 else after.call(to, wide, dtype)


def _is_window(stored: StoredWeight) -> bool:
    """Tell whether integers are a convolution's that kernels read with channels innermost."""
    integers, is_layer = stored.integers, stored.axis == 0 and stored.integers.ndim in (3, 4)
    is_window = is_layer and integers.shape[1] > 1 and math.prod(integers.shape[2:]) > 1
    return is_window and integers.dtype == torch.int8


def _after_inputs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the node after the last input, for each node before that one, as torch.export has."""
    nodes = list(graph.nodes)
    inputs = [index for index, node in enumerate(nodes) if node.op == "placeholder"]
    if not inputs:
        return {}
    after: fx.Node = nodes[inputs[-1] + 1]
    return dict.fromkeys(nodes[: inputs[-1]], after)


class _Chain:
    """Inserts nodes one after the other."""

    def __init__(self, edit: EditSession, last: fx.Node) -> None:
        self.edit = edit
        self.last = last

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        self.last = self.edit.call(target, *args, after=self.last, **kwargs)
        return self.last


def convert(prepared: PreparedProgram | QatProgram) -> Program:
    """Return the reference graph of a calibrated or trained program: it quantises and dequantises.

    The prepared program stays as it is, and can be calibrated further.

    Args:
        prepared: What `prepare` or `prepare_qat` returned.

    Returns:
        A captured program, or a graph where a graph was prepared.

    Raises:
        UnsupportedError: When calibration was never run and scales are needed from it.
    """
    if isinstance(prepared, QatProgram):
        prepared = prepared.prepared()
    places = as_prepared(prepared).places
    observers = places.observers.values()
    if places.specs and not any(observer.count for observer in observers):
        if any(observer.not_finite for observer in observers):
            raise UnsupportedError(
                "expected activations that are finite in calibration, got none that are",
                hint="look for NaN and infinities in the batches, and in what the model computes",
            )
        raise UnsupportedError(
            "expected a calibrated program, got one whose observers have seen no values",
            hint="call the prepared program with some batches first, which are not empty",
        )
    ranges = {}
    for name, observer in places.observers.items():
        if observer.count:
            seen = observer.value_range()
            ranges[name] = parameters_of(seen.low, seen.high, places.specs[name])
    program = prepared.remake()
    _add_other_mode(prepared, program, ranges)
    if _has_fast_paths(program):
        with torch.set_grad_enabled(not torch.is_grad_enabled()):
            _add_other_mode(prepared, prepared.remake(), ranges)
    quantize = QuantizeOperands(prepared.config, ranges, places, prepared.choices.copy())
    return apply(program, quantize)


def _add_other_mode(
    prepared: PreparedProgram, program: Program, ranges: dict[str, QuantizationParameters]
) -> None:
    """Add the ranges of what has other names in a graph with gradients than in one without."""
    gm = graph_module_of(program)
    others = prepared.places.keys_in_other_mode(gm, placements(gm, prepared.config))
    known = {name: ranges[key] for name, key in others.items() if key in ranges}
    ranges |= {name: found for name, found in known.items() if name not in ranges}


def _has_fast_paths(program: Program) -> bool:
    """Tell whether a model has layers that torch computes in one call when no gradient is asked."""
    model = model_of(program)
    return model is not None and any(isinstance(one, _WITH_FAST_PATHS) for one in model.modules())
