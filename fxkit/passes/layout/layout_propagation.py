"""Lay out the images of a graph with their channels innermost, from node to node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.effects import effects_of
from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import PassContext
from fxkit.passes.layers.layers import Layer, layer_of
from fxkit.passes.layers.refused import Refused
from fxkit.passes.layers.weights import Weights, memory_of
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.operators import OpOverload

# Operators whose numbers follow from where elements lie in memory.
_READS_MEMORY = frozenset(
    """
    aten.as_strided aten.as_strided_ aten.set_ aten.resize_ aten.resize_as_ python.data_ptr
    python.stride python.is_contiguous python.storage_offset aten.view_as_real aten.view_as_complex
    """.split()
)


class LayoutPropagation:
    """Gives a graph's images, node by node, the layout that is found in front of each node.

    Args:
        edit: The session.

    Attributes:
        edit: The session.
        weights: The graph's constants.
        before: Nodes whose layout has changed → what their type was.
    """

    def __init__(self, edit: EditSession) -> None:
        self.edit = edit
        self.weights = Weights(edit)
        self.before: dict[fx.Node, Any] = {}
        self.converted: dict[fx.Node, fx.Node] = {}
        self.returned: dict[fx.Node, fx.Node] = {}

    def visit_all(self, context: PassContext) -> None:
        """Visit the nodes in order; where one refuses, take all back and note why."""
        mark = self.edit.mark()
        try:
            for node in list(self.edit.graph.nodes):
                self.visit(node)
        except Refused as refusal:
            self.edit.undo(mark)
            self.restore_types()
            context.notes.append(f"all stays as it is: {refusal}")

    def visit(self, node: fx.Node) -> None:
        """Convert a convolution, or let a node take operands in their new layout."""
        layer = layer_of(node, self.weights)
        if isinstance(layer, Layer) and layer.axes == 2:
            self._convert(layer)
        elif any(operand in self.before for operand in node.all_input_nodes):
            self._follow(node)

    def restore_types(self) -> None:
        """Bring back all types."""
        for node, known in self.before.items():
            node.meta[TYPE_KEY] = known

    def _convert(self, layer: Layer) -> None:
        node, known = layer.node, type_of(layer.input)
        if not isinstance(known, TensorType) or len(known.shape) != 4:
            if any(operand in self.before for operand in node.all_input_nodes):
                self._follow(node)
            return
        weight = layer.weight.contiguous(memory_format=torch.channels_last)
        source = self._image(layer.input, known, layer)
        if is_channels_last(known) and weight.stride() == layer.weight.stride():
            self._follow(node)
            return
        gradient = self.weights.needs_gradient(layer.weight_operand)
        with self.edit.on_behalf_of([node], "channels_last"):
            read = self.weights.keep(
                f"{node.name}_weight", weight, key=memory_of(layer.weight), gradient=gradient,
                before=node,
            )  # fmt: skip
            bias = self._bias(layer)
            new = layer.rebuild(self.edit, read, bias, before=node, operand=source)
        self.weights.replaced(node, self.weights.inserted(new))
        self.edit.replace(node, new)
        self._note(new, type_of(new))

    def _bias(self, layer: Layer) -> Any:
        if layer.bias_operand is None or isinstance(layer.bias_operand, fx.Node):
            return layer.bias_operand
        read = self.edit.get_attr(layer.bias_operand.path, before=layer.node)
        set_type(read, TensorType.of(layer.bias) if layer.bias is not None else None)
        return self.weights.inserted(read)

    def _image(self, image: fx.Node, known: TensorType, layer: Layer) -> fx.Node:
        """Return an image with its channels innermost; each is converted once."""
        if is_channels_last(known):
            return image
        made = self.converted.get(image)
        if made is not None and not self.weights.order.written_between(image, made, layer.node):
            return made
        options = {"memory_format": torch.channels_last}
        with self.edit.on_behalf_of([layer.node], "channels_last"):
            made = self._call(layer.is_spelled_in_aten, image, options, layer.node)
        self.converted[image] = made
        return made

    def _call(
        self, is_aten: bool, operand: fx.Node, options: dict[str, Any], place: fx.Node
    ) -> fx.Node:
        if is_aten:
            target, kind = torch.ops.aten.clone.default, "call_function"
        else:
            target, kind = "contiguous", "call_method"
        made = self.edit.insert(kind, target, (operand,), options, before=place)
        known = type_of(operand)
        infer_type(made)
        if isinstance(known, TensorType):
            set_type(made, replace(type_of(made), requires_grad=known.requires_grad))
        return self.weights.inserted(made)

    def _note(self, node: fx.Node, old: Any) -> None:
        """Work out the type of a node whose operands changed; remember what it was."""
        new = infer_type(node)
        if _is_same(old, new):
            node.meta[TYPE_KEY] = old
            return
        if _form(old) != _form(new):
            raise Refused(f"%{node.name} would be of another shape or dtype")
        self.before[node] = old
        node.meta[TYPE_KEY] = _with_gradient_of(old, new)

    def _follow(self, node: fx.Node) -> None:
        """Let a node take operands in their new layout where it can, else bring them back."""
        if node.op == "output" or self._needs_old_layout(node):
            self._bring_back(node)
            return
        old = type_of(node)
        new = infer_type(node)
        if new is None or _form(old) != _form(new):
            node.meta[TYPE_KEY] = old
            self._bring_back(node)
            return
        node.meta[TYPE_KEY] = old
        self._note(node, old)

    def _needs_old_layout(self, node: fx.Node) -> bool:
        effects, call = effects_of(node), resolve(node)
        is_told = call is None or call.name in _READS_MEMORY
        return is_told or effects.is_opaque or effects.is_random

    def _bring_back(self, node: fx.Node) -> None:
        """Give a node its operands as they were laid out before."""
        effects = effects_of(node)
        for operand in node.all_input_nodes:
            if operand not in self.before:
                continue
            if any(operand < writer for writer in self.weights.order.aliases.writers(operand)):
                raise Refused(f"%{operand.name} is written to, and %{node.name} needs its layout")
            if operand in effects.writes:
                raise Refused(f"%{node.name} may write to %{operand.name}")
            self._swap(node, operand, self._old_layout(operand, node))

    def _old_layout(self, operand: fx.Node, node: fx.Node) -> fx.Node:
        known = self.before[operand]
        if not isinstance(known, TensorType) or not known.is_contiguous:
            raise Refused(f"%{operand.name} was not contiguous, and %{node.name} needs its layout")
        made = self.returned.get(operand)
        if made is None:
            is_aten = isinstance(operand.target, OpOverload)
            dense = {"memory_format": torch.contiguous_format}
            with self.edit.on_behalf_of([operand], "channels_last"):
                made = self._call(is_aten, operand, dense if is_aten else {}, operand.next)
            self.returned[operand] = made
        return made

    def _swap(self, node: fx.Node, old: fx.Node, new: fx.Node) -> None:
        self.edit.set_args(
            node,
            map_arg(node.args, lambda n: new if n is old else n),
            map_arg(node.kwargs, lambda n: new if n is old else n),
        )


def is_channels_last(known: TensorType) -> bool:
    """Tell whether images lie densely with their channels innermost.

    Args:
        known: Their type: [batch, channels, height, width].
    """
    if len(known.shape) != 4:
        return False
    _, channels, height, width = known.shape
    return known.stride == (channels * height * width, 1, width * channels, channels)


def _is_same(old: Any, new: Any) -> bool:
    olds, news = pytree.tree_leaves(old), pytree.tree_leaves(new)
    return _form(old) == _form(new) and [_stride(o) for o in olds] == [_stride(n) for n in news]


def _stride(leaf: Any) -> Any:
    return leaf.stride if isinstance(leaf, TensorType) else None


def _form(known: Any) -> list[Any]:
    """Return what of a nested type does not depend on the layout."""
    return [
        (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, TensorType) else leaf
        for leaf in pytree.tree_leaves(known)
    ]


def _with_gradient_of(old: Any, new: Any) -> Any:
    leaves, spec = pytree.tree_flatten(new)
    kept = [
        replace(n, requires_grad=o.requires_grad) if isinstance(n, TensorType) else n
        for n, o in zip(leaves, pytree.tree_leaves(old), strict=True)
    ]
    return pytree.tree_unflatten(kept, spec)
