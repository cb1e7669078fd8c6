"""Convolve the integers of a quantised graph, with channels innermost from layer to layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.building.toolchain import has_compiler
from fxkit.lower.compiling.float_reasons import reason_in_float, takes_dequantized
from fxkit.lower.compiling.layout_of_images import ImageLayoutPropagation
from fxkit.lower.compiling.lower_report import STAYS
from fxkit.lower.compiling.quantized_operands import MOST_TERMS, integers_of, weight_of
from fxkit.lower.compiling.token_scales import Factor
from fxkit.lower.families.convolutions.nodes import has_channels_innermost
from fxkit.lower.families.integer_convolutions import innermost_weight
from fxkit.lower.families.integer_convolutions.autotune import reason_to_stay_float
from fxkit.lower.families.integer_convolutions.custom_op import operator
from fxkit.lower.families.integer_convolutions.nodes import (
    convolution_of,
    has_dense_windows,
)
from fxkit.lower.loop_ir.convolution import result_size
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.passes.base import Pass, PassContext

aten = torch.ops.aten

_AXES = {"aten.conv1d": 1, "aten.conv2d": 2}


@dataclass(frozen=True)
class ConvolveIntegers(Pass):
    """Convolve integers where a convolution takes dequantised activations and weights.

    Sums are exact in 32 bits; scales, bias and what follows are applied to them in float32. Images
    keep their channels innermost until something needs them as they were. A layer that float32
    convolves as fast stays as it is.

    Rewrites:
        %x = quantized_decomposed.dequantize_per_tensor(%q, 0.1, 3, 0, 255, torch.uint8)
        %w = quantized_decomposed.dequantize_per_channel(%r, %s, None, 0, -127, 127, torch.int8)
        return aten.conv2d(%x, %w)
        →
        %l = aten.clone(%q, channels_last)
        %t = fxkit.innermost_weight(%r, 0)
        %i = fxkit.integer_convolution(%l, %t, 3, [1, 1], [0, 0], [1, 1], 1)
        %c = aten.reshape(aten.mul(%s, 0.1), [-1, 1, 1])
        return aten.contiguous(aten.mul(aten.to(%i, torch.float32), %c))
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rewrite each layer that gains. Cost: linear, and trials of sizes not met before."""
        if not has_compiler():
            return
        convolver = _Convolver(edit, context)
        if convolver.found:
            convolver.visit_all(context)


@dataclass(frozen=True)
class _Layer:
    """A convolution of what was dequantised.

    Attributes:
        node: The convolution.
        left: Its images.
        right: Its weight.
        bias: Its bias, or None.
        settings: Stride, padding and dilation, each down and across.
        groups: The number of groups.
        axes: How many axes it moves along.
    """

    node: fx.Node
    left: Factor
    right: Factor
    bias: fx.Node | None
    settings: tuple[tuple[int, ...], ...]
    groups: int
    axes: int


class _Convolver(ImageLayoutPropagation):
    """Replaces convolutions, and lets what reads them follow their layout."""

    def __init__(self, edit: EditSession, context: PassContext) -> None:
        super().__init__(edit)
        self.found: dict[fx.Node, _Layer] = {}
        for node in edit.graph.nodes:
            layer = _layer_of(node)
            if layer is None:
                self._note_float(node, context)
                continue
            reason = _reason_to_stay(layer)
            if reason is None:
                self.found[node] = layer
            else:
                context.notes.append(f"%{node.name} {STAYS}: {reason}")

    def _note_float(self, node: fx.Node, context: PassContext) -> None:
        """Say why a convolution is not one of integers."""
        call = resolve(node)
        axes = _AXES.get(call.name) if call is not None else None
        if call is None or not call.name.startswith("aten.conv"):
            return
        if axes is None and takes_dequantized(node):
            context.notes.append(f"%{node.name} {STAYS}: it is transposed, or along three axes")
        elif axes is not None:
            operands = call.arguments["input"], call.arguments["weight"]
            context.notes.append(
                f"%{node.name} {STAYS}: {reason_in_float(*operands, rank=axes + 2)}"
            )

    def visit(self, node: fx.Node) -> None:
        """Replace a convolution, or let a node take operands in their new layout."""
        if node in self.found:
            with self.edit.on_behalf_of([node], "convolve_integers"):
                self._convolve(self.found[node])
        elif any(operand in self.before for operand in node.all_input_nodes):
            self._follow(node)

    def _convolve(self, layer: _Layer) -> None:
        node, old = layer.node, type_of(layer.node)
        images, weight = layer.left.node, self._dense(layer)
        if layer.axes == 1:
            images = self._put(node, aten.unsqueeze.default, images, 2)
            weight = self._put(node, aten.unsqueeze.default, weight, 2)
        images = self._innermost(node, images)
        operands = [images, weight, layer.left.zero, *layer.settings, layer.groups]
        value = self._put(node, operator(), *operands)
        value = self._put(node, aten.to.dtype, value, torch.float32)
        value = self._put(node, aten.mul.Tensor, value, self._scale(layer))
        if layer.bias is not None:
            column = self._put(node, aten.reshape.default, layer.bias, [-1, 1, 1])
            value = self._put(node, aten.add.Tensor, value, column)
        if layer.axes == 1:
            value = self._put(node, aten.squeeze.dim, value, 2)
        self.weights.replaced(node, value)
        self.edit.replace(node, value)
        self._note(value, old)

    def _dense(self, layer: _Layer) -> fx.Node:
        """Return the weight as kernels read it; one that lies in another order is copied once."""
        weight = layer.right.node
        known = type_of(weight)
        assert isinstance(known, TensorType)
        if has_dense_windows(known):
            return weight
        stored = _copied(weight)
        if stored is not None:
            return stored
        slot = innermost_weight.new_slot()
        return self._put(layer.node, innermost_weight.operator(), weight, slot)

    def _scale(self, layer: _Layer) -> fx.Node | float:
        step, by_channel = layer.left.scale, layer.right.scale
        if not isinstance(by_channel, fx.Node):
            assert isinstance(step, float)
            return by_channel * step
        scale = self._put(layer.node, aten.mul.Tensor, by_channel, step)
        return self._put(layer.node, aten.reshape.default, scale, [-1, 1, 1])

    def _innermost(self, place: fx.Node, images: fx.Node) -> fx.Node:
        """Return images with their channels innermost; each is copied once."""
        known = type_of(images)
        if isinstance(known, TensorType) and has_channels_innermost(known):
            return images
        made = self.converted.get(images)
        if made is None or self.weights.order.written_between(images, made, place):
            made = self.edit.insert(
                "call_function",
                aten.clone.default,
                (images,),
                {"memory_format": torch.channels_last},
                before=place,
            )
            infer_type(made)
            self.converted[images] = self.weights.inserted(made)
        return made

    def _put(self, place: fx.Node, target: Any, *args: Any) -> fx.Node:
        made = self.edit.call(target, *args, before=place)
        infer_type(made)
        return self.weights.inserted(made)


def _copied(weight: fx.Node) -> fx.Node | None:
    """Return what a weight is a copy of, where that is stored as kernels read it.

    Graphs copy such weights because results of ATen's convolutions are laid out as the weight is.
    """
    copied = resolve(weight)
    if copied is None or copied.name != "aten.clone":
        return None
    view: fx.Node = copied.arguments["self"]
    moved, known = resolve(view), type_of(view)
    if moved is None or moved.name != "aten.permute" or moved.arguments["self"].op != "get_attr":
        return None
    return view if isinstance(known, TensorType) and has_dense_windows(known) else None


def _layer_of(node: fx.Node) -> _Layer | None:
    """Return a convolution of dequantised images by a dequantised weight; None where it is none."""
    call = resolve(node)
    axes = _AXES.get(call.name) if call is not None else None
    if call is None or axes is None:
        return None
    arguments = call.arguments
    left, right = integers_of(arguments["input"]), weight_of(arguments["weight"], axes + 2)
    settings = _settings(call, axes)
    if left is None or right is None or settings is None or len(_shape(left)) != axes + 2:
        return None
    bias, groups = arguments["bias"], arguments["groups"]
    return _Layer(node, left, right, bias, settings, groups, axes)


def _settings(call: Call, axes: int) -> tuple[tuple[int, ...], ...] | None:
    """Return stride, padding and dilation along two axes, if they are numbers."""
    found = []
    for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
        given = call.arguments[name]
        values = list(given) if isinstance(given, (list, tuple)) else [given] * axes
        values = values * axes if len(values) == 1 else values
        if len(values) != axes or not all(isinstance(value, int) for value in values):
            return None
        found.append(tuple([default] * (2 - axes) + values))
    return tuple(found)


def _reason_to_stay(layer: _Layer) -> str | None:
    """Return why a convolution of these sizes does not gain by integers, or None."""
    images, windows = _shape(layer.left), _shape(layer.right)
    device = type_of(layer.node).device  # type: ignore[union-attr]
    if device.type != "cpu":
        return f"it is on {device}, where no library convolves integers"
    if isinstance(layer.right.zero, fx.Node):
        return "its weight has zero points"
    if not isinstance(layer.left.zero, int):
        return "its images have a zero point for each row"
    depth = math.prod(windows[1:])
    if depth > MOST_TERMS:
        return f"sums of {depth} products may need more than 32 bits"
    if layer.axes == 1:
        images, windows = ((*s[:2], 1, s[2]) for s in (images, windows))
    sizes = result_size(images[2:], windows[2:], *layer.settings)
    left, right = type_of(layer.left.node), type_of(layer.right.node)
    result = _innermost_type(left, (images[0], windows[0], *sizes))
    stride, padding, dilation = layer.settings
    arguments = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": layer.groups,
        "zero": layer.left.zero,
    }
    try:
        types = (_innermost_type(left, images), _innermost_type(right, windows))
        return reason_to_stay_float(convolution_of(*types, result, arguments))
    except Unfusable as error:
        return error.message


def _innermost_type(known: Any, shape: Sequence[int]) -> TensorType:
    """Return a type of images with their channels innermost."""
    _, channels, height, width = shape
    strides = (channels * height * width, 1, width * channels, channels)
    return TensorType(tuple(shape), known.dtype, strides, known.device)


def _shape(one: Factor) -> tuple[int, ...]:
    known = type_of(one.node)
    assert isinstance(known, TensorType)
    return tuple(int(size) for size in known.shape)
