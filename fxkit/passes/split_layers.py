"""Compute a layer whose result is taken apart part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxkit.analysis.retyping import Retyping
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.layers.layers import Layer, layer_of
from fxkit.passes.layers.weights import Weights
from fxkit.torch_adapters.fx_nodes import is_erased


@dataclass(frozen=True)
class SplitLayers(Pass):
    """Split a linear layer or convolution of whose result only parts of the channels are used.

    The counterpart of `MergeLayers`: for what treats the parts differently, such as quantisation
    with one scale a part, or a backend that wants each result dense. The new weights are views of
    the old one. For inference only: each part is a parameter of its own.

    Rewrites:
        %qk = aten.linear(%x, self.qk, self.b)
        %q = aten.narrow(%qk, -1, 0, 8); %k = aten.narrow(%qk, -1, 8, 4)
            →  %q = aten.linear(%x, self.qk_0, self.b_0); %k = aten.linear(%x, self.qk_8, self.b_8)
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the layers in order. Cost: linear in the nodes."""
        splitter = _Splitter(edit, context)
        for node in list(edit.graph.nodes):
            if not is_erased(node):
                splitter.visit(node)


@dataclass(frozen=True)
class _Part:
    node: fx.Node
    start: int
    size: int


class _Splitter:
    def __init__(self, edit: EditSession, context: PassContext) -> None:
        self.edit = edit
        self.context = context
        self.weights = Weights(edit)

    def visit(self, node: fx.Node) -> None:
        """Split one layer whose users all take parts, or note why not."""
        layer = layer_of(node, self.weights)
        known = type_of(node)
        if isinstance(layer, str) or not isinstance(known, TensorType):
            return
        axis, rank = (1 if layer.axes else len(known.shape) - 1), len(known.shape)
        found = [_parts(user, node, axis, rank, layer.out_channels) for user in node.users]
        parts = [part for some in found if some is not None for part in some]
        if len(parts) < 2 or None in found or layer.groups != 1 or layer.is_transposed:
            return
        if self.weights.order.aliases.is_written(node):
            self.context.notes.append(f"%{node.name} stays whole: a part is written to")
            return
        mark, types = self.edit.mark(), Retyping()
        reason = self._split(layer, parts, types)
        if reason is not None:
            self.edit.undo(mark)
            types.restore()
            self.weights.forget()
            self.context.notes.append(f"%{node.name} stays whole: {reason}")

    def _split(self, layer: Layer, parts: list[_Part], types: Retyping) -> str | None:
        for part in parts:
            with self.edit.on_behalf_of([layer.node, part.node], "split_layers"):
                alone = self._alone(layer, part)
            self.edit.replace_uses(part.node, alone)
            reason = types.propagate([alone])
            if reason is not None:
                return reason
        for node in [part.node for part in parts] + list(layer.node.users):
            if not is_erased(node) and not node.users:
                self.edit.erase(node)
        self.edit.erase(layer.node)
        return None

    def _alone(self, layer: Layer, part: _Part) -> fx.Node:
        axis = 1 if layer.is_flipped else 0
        values = [("weight", layer.weight.narrow(axis, part.start, part.size))]
        if layer.bias is not None:
            values.append(("bias", layer.bias.narrow(0, part.start, part.size)))
        gradient = self.weights.needs_gradient(layer.weight_operand, layer.bias_operand)
        reads = [
            self.weights.keep(
                f"{layer.node.name}_{kind}_{part.start}", value,
                key=(layer.node.name, kind, part.start, part.size), gradient=gradient,
                before=layer.node,
            )
            for kind, value in values
        ]  # fmt: skip
        bias = reads[1] if len(reads) > 1 else None
        new = layer.rebuild(self.edit, reads[0], bias, before=layer.node)
        return self.weights.inserted(new)


def _parts(user: fx.Node, whole: fx.Node, axis: int, rank: int, size: int) -> list[_Part] | None:
    """Return what a user takes out of a tensor along an axis; None when it does more than that."""
    call = resolve(user)
    if call is None or user.all_input_nodes != [whole]:
        return None
    dim = call.arguments.get("dim", 0)
    if not isinstance(dim, int) or dim % rank != axis:
        return None
    if call.name in ("aten.narrow", "aten.slice"):
        part = _cut(user, call, size)
        return None if part is None else [part]
    sizes = _sizes(call, size)
    return None if sizes is None else _items(user, sizes)


def _cut(user: fx.Node, call: Call, size: int) -> _Part | None:
    arguments = call.arguments
    start = arguments.get("start")
    start = 0 if start is None else start
    if call.name == "aten.narrow":
        length = arguments["length"]
    else:
        end = arguments.get("end")
        end = size if end is None or (isinstance(end, int) and end > size) else end
        if not isinstance(start, int) or not isinstance(end, int) or arguments.get("step") != 1:
            return None
        length = (end + size if end < 0 else end) - (start + size if start < 0 else start)
    if not isinstance(start, int) or not isinstance(length, int) or length < 1:
        return None
    start = start + size if start < 0 else start
    return _Part(user, start, length) if 0 <= start <= size - length else None


def _sizes(call: Call, size: int) -> list[int] | None:
    """Return the sizes of the parts that a call splits a tensor into."""
    arguments = call.arguments
    if call.name in ("aten.chunk", "aten.unsafe_chunk"):
        step = -(-size // arguments["chunks"])
    elif call.name in ("aten.split", "aten.unsafe_split"):
        step = arguments["split_size"]
    elif call.name == "aten.split_with_sizes":
        step = arguments["split_sizes"]
    else:
        return None
    if isinstance(step, (list, tuple)):
        is_known = all(isinstance(one, int) and one > 0 for one in step)
        return list(step) if is_known and sum(step) == size else None
    if not isinstance(step, int) or step < 1:
        return None
    return [min(step, size - start) for start in range(0, size, step)]


def _items(node: fx.Node, sizes: list[int]) -> list[_Part] | None:
    """Return the parts that are taken out of a list of them."""
    found = []
    for user in node.users:
        call = resolve(user)
        index = user.args[1] if len(user.args) == 2 else None
        if call is None or call.name != "python.getitem" or not isinstance(index, int):
            return None
        position = index % len(sizes)
        found.append(_Part(user, sum(sizes[:position]), sizes[position]))
    return found
