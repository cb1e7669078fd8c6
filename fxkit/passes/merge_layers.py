"""Compute layers that share their operand in one call: queries, keys and values; gate and up."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.retyping import Retyping
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.layers.layers import Layer, layer_of
from fxkit.passes.layers.weights import Weights
from fxkit.torch_adapters.fx_nodes import is_erased


@dataclass(frozen=True)
class MergeLayers(Pass):
    """Merge linear layers, and convolutions, that share an operand into one with several parts.

    The weights are put together once, in new parameters, so that what is learnt or loaded
    afterwards into the old ones is not seen: for inference only. A missing bias among others is
    zero. The parts are views of the one result. Where a user can't take a view, or the caller would
    see one, the part is copied; when that would cost as many calls as are saved, nothing is merged.

    It saves calls and reads the operand once. That pays where a call costs more than its work, as
    on a GPU with few rows; on one core of a CPU it was measured to be neither faster nor slower.
    The old parameters stay in the module beside the new ones until they are dropped.

    Rewrites:
        %q = aten.linear(%x, self.q, self.b); %k = aten.linear(%x, self.k)
            →  %qk = aten.linear(%x, self.qk, self.qk_bias)
               %q = aten.narrow(%qk, -1, 0, 8); %k = aten.narrow(%qk, -1, 8, 4)

    Attributes:
        convolutions: Whether to merge convolutions without groups too.
    """

    convolutions: bool = True

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the layers by what they share. Cost: linear in the nodes, and in the weights."""
        merger = _Merger(edit, context)
        for node in list(edit.graph.nodes):
            if not is_erased(node):
                merger.collect(node, self.convolutions)
        for group in merger.groups:
            if len(group) > 1:
                merger.merge(group)


class _Merger:
    def __init__(self, edit: EditSession, context: PassContext) -> None:
        self.edit = edit
        self.context = context
        self.weights = Weights(edit)
        self.groups: list[list[Layer]] = []
        self._open: dict[Hashable, list[Layer]] = {}

    def collect(self, node: fx.Node, convolutions: bool) -> None:
        """Put a layer to those that it can be merged with."""
        layer = layer_of(node, self.weights)
        if isinstance(layer, str) or (layer.axes and not convolutions):
            return
        form = _form(layer)
        order = self.weights.order
        if form is None or order.aliases.is_written(node):
            return
        group = self._open.get(form)
        if group is not None:
            first = group[0].node
            is_same = order.written_between(layer.input, first, node) is None
            if is_same and order.mode_between(first, node) is None:
                group.append(layer)
                return
        self._open[form] = [layer]
        self.groups.append(self._open[form])

    def merge(self, group: list[Layer]) -> None:
        """Merge layers, or note why not."""
        names = ", ".join(f"%{layer.node.name}" for layer in group)
        mark, types = self.edit.mark(), Retyping()
        with self.edit.on_behalf_of([layer.node for layer in group], "merge_layers"):
            merged = self._merged(group)
            reason, copies = types.propagate([merged]), 0
            for layer, start in zip(group, _starts(group), strict=True):
                if reason is not None:
                    break
                reason = self._take_part(layer, merged, start, types)
                copies += reason is not None
                if reason is not None and copies < len(group) - 1:
                    reason = self._copy_part(layer, merged, start, types)
        if reason is not None:
            self.edit.undo(mark)
            types.restore()
            self.weights.forget()
            self.context.notes.append(f"{names} stay apart: {reason}")

    def _merged(self, group: list[Layer]) -> fx.Node:
        """Insert the one layer in front of the first of a group."""
        first, last = group[0], group[-1]
        axis = 1 if first.is_flipped else 0
        weight = torch.cat([layer.weight for layer in group], axis)
        if first.axes and all(_is_channels_last(layer.weight) for layer in group):
            weight = weight.contiguous(memory_format=_CHANNELS_LAST[first.axes])
        bias = None
        if any(layer.bias is not None for layer in group):
            bias = torch.cat([_bias(layer) for layer in group])
        operands = [o for layer in group for o in (layer.weight_operand, layer.bias_operand)]
        gradient = self.weights.needs_gradient(*operands)
        name = f"{first.node.name}_to_{last.node.name}"
        reads = [
            None
            if value is None
            else self.weights.keep(
                f"{name}_{kind}", value, key=(name, kind), gradient=gradient, before=first.node
            )
            for kind, value in (("weight", weight), ("bias", bias))
        ]
        assert reads[0] is not None
        merged = first.rebuild(self.edit, reads[0], reads[1], before=first.node)
        return self.weights.inserted(merged)

    def _take_part(self, layer: Layer, merged: fx.Node, start: int, types: Retyping) -> str | None:
        """Let the users of a layer use a view of the merged one; say why they can't."""
        mark = self.edit.mark()
        part = self._part(layer, merged, start)
        self.edit.replace_uses(layer.node, part)
        reason = types.propagate([part])
        if reason is not None:
            self.edit.undo(mark)
            return reason
        self.edit.erase(layer.node)
        return None

    def _copy_part(self, layer: Layer, merged: fx.Node, start: int, types: Retyping) -> str | None:
        part = self._part(layer, merged, start)
        known = type_of(layer.node)
        if not isinstance(known, TensorType) or not known.is_contiguous:
            return f"%{layer.node.name} is not contiguous"
        if layer.is_spelled_in_aten:
            clone, dense = torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}
            copied = self.edit.insert("call_function", clone, (part,), dense, before=layer.node)
        else:
            copied = self.edit.call(".contiguous", part, before=layer.node)
        set_type(copied, known)
        self.weights.inserted(copied)
        self.edit.replace(layer.node, copied)
        return types.propagate([part])

    def _part(self, layer: Layer, merged: fx.Node, start: int) -> fx.Node:
        dim, size = (1 if layer.axes else -1), layer.out_channels
        place = layer.node
        if layer.is_spelled_in_aten:
            cut = torch.ops.aten.slice.Tensor
            part = self.edit.call(cut, merged, dim, start, start + size, before=place)
        else:
            part = self.edit.call(torch.narrow, merged, dim, start, size, before=place)
        return self.weights.inserted(part)


def _form(layer: Layer) -> Hashable | None:
    """Return what layers have in common that can be merged; None for one that can't be."""
    known, made = type_of(layer.input), type_of(layer.node)
    if not isinstance(known, TensorType) or not isinstance(made, TensorType):
        return None
    if layer.is_transposed or layer.groups != 1 or not layer.weight.numel():
        return None
    if layer.axes and len(known.shape) != layer.axes + 2:
        return None
    weight = layer.weight
    bias_dtype = weight.dtype if layer.bias is None else layer.bias.dtype
    if bias_dtype != weight.dtype:
        return None
    options = [
        (name, str(value))
        for name, value in layer.call.arguments.items()
        if name in ("stride", "padding", "dilation", "output_padding")
    ]
    kernel = tuple(weight.shape[2:])
    same = (layer.input, layer.axes, layer.is_flipped, layer.is_spelled_in_aten, kernel)
    return (*same, weight.dtype, weight.device, layer.call.name, tuple(options))


def _starts(group: list[Layer]) -> list[int]:
    starts = [0]
    for layer in group[:-1]:
        starts.append(starts[-1] + layer.out_channels)
    return starts


def _bias(layer: Layer) -> Any:
    if layer.bias is not None:
        return layer.bias
    weight = layer.weight
    return torch.zeros(layer.out_channels, dtype=weight.dtype, device=weight.device)


_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def _is_channels_last(weight: torch.Tensor) -> bool:
    kind = _CHANNELS_LAST.get(weight.dim() - 2)
    return kind is not None and weight.is_contiguous(memory_format=kind)
