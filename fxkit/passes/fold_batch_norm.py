"""Let convolutions and linear layers do what a batch norm beside them does outside of training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import Call, resolve
from fxkit.ir.provenance import stand_where
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.layers.layers import Layer, layer_of
from fxkit.passes.layers.norms import (
    NORMS,
    Affine,
    Norm,
    before,
    behind,
    only_operand,
    read_norm,
    turned,
)
from fxkit.passes.layers.refused import Refused
from fxkit.passes.layers.weights import Weights, memory_of
from fxkit.torch_adapters.fx_nodes import order_key
from fxkit.torch_adapters.operators import OpOverload

Share = tuple[Layer, Affine]


@dataclass(frozen=True)
class FoldBatchNorm(Pass):
    """Fold each batch norm outside of training into the layers before it, else into those after it.

    With its running statistics a batch norm is `x * scale + shift`, one number a channel. It goes

    - backwards into a convolution (1d, 2d, 3d, transposed, grouped) or linear layer whose result
      nobody else uses, also through what treats every channel alike: average pooling without
      padding, maximum pooling where no scale is negative, concatenations of such layers, and
      transposes that bring a linear layer's results to the axis of channels;
    - forwards into all the layers that use it, where no zero padding shows: a shift does not reach
      the zeros that a convolution pads with;
    - by halves, where every scale is positive: as relu(x * scale + shift) is
      relu(x + shift / scale) * scale, the layers behind relu and pooling take the scale, padding or
      not, and one addition is left in the norm's place.

    Weights are folded in float64 and kept as new parameters, so that what is learnt or loaded
    afterwards into the old ones is not seen: for inference only.

    A library may begin its sums with the shift, as oneDNN does on processors without AVX-512. Where
    that is many times as large as the results, their error grows: measured there, 1.6 to 2.6 times
    with a shift as large as the results, 4 to 9 times with one ten times as large, and at most 1.5
    times at the end of whole networks.

    Rewrites:
        %c = aten.conv2d(%x, self.w); return aten.batch_norm(%c, self.g, self.b, self.m, self.v)
            →  return aten.conv2d(%x, self.c_weight, self.c_bias)
        %n = aten.batch_norm(%x, ...); %r = aten.relu(%n); return aten.conv2d(%r, self.w, self.b)
            →  %n = aten.add(%x, self.n_shift); %r = aten.relu(%n);
               return aten.conv2d(%r, self.c_weight, self.b)

    Attributes:
        by_halves: Whether to leave an addition where only the scale can be folded.
    """

    by_halves: bool = True

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the norms in order, and those that stay again as long as others go.

        Cost: linear in the nodes, in what is folded, and in the norms that stay for each round; a
        norm that goes seldom makes room for another.
        """
        folder = _Folder(edit, self)
        staying = [node for node in edit.graph.nodes if _is_norm(node)]
        count = len(staying) + 1
        while len(staying) < count:
            count = len(staying)
            folder.reasons.clear()
            staying = [node for node in staying if not folder.visit(node)]
        context.notes.extend(folder.reasons)


def _is_norm(node: fx.Node) -> bool:
    call = resolve(node)
    return call is not None and call.name in NORMS


class _Folder:
    def __init__(self, edit: EditSession, options: FoldBatchNorm) -> None:
        self.edit = edit
        self.reasons: list[str] = []
        self.ways = [self._backwards, self._forwards]
        if options.by_halves:
            self.ways.append(self._by_halves)
        self.weights = Weights(edit)

    def visit(self, node: fx.Node) -> bool:
        """Fold one norm and say so, or note why it stays."""
        call, reasons = resolve(node), dict[str, None]()
        assert call is not None
        try:
            norm = read_norm(node, call, self.weights)
        except Refused as refusal:
            self.reasons.append(f"%{node.name} stays: {refusal}")
            return False
        for way in self.ways:
            mark = self.edit.mark()
            try:
                way(norm)
                return True
            except Refused as refusal:
                self.edit.undo(mark)
                self.weights.forget()
                reasons[str(refusal)] = None
        self.reasons.append(f"%{node.name} stays: {'; '.join(reasons)}")
        return False

    # The three ways.

    def _backwards(self, norm: Norm) -> None:
        """Fold into the layers that compute the norm's operand."""
        if norm.rank is None:
            raise Refused(f"the rank of %{norm.input.name} is not known; give args")
        shares = self._sources(norm, norm.input, norm.affine, norm.node, 1)
        if len({layer.node for layer, _ in shares}) != len(shares):
            raise Refused(f"%{norm.input.name} joins a tensor with itself")
        value = norm.input
        for layer, affine in shares:
            new = self._folded_output(layer, affine, norm)
            value = new if layer.node is value else value
        self._drop(norm, value)

    def _forwards(self, norm: Norm) -> None:
        """Fold into all the layers that take the norm's result."""
        aliases = self.weights.order.aliases
        writers = [*aliases.writers(norm.result), *aliases.writers(norm.input)]
        late = [writer for writer in writers if norm.node < writer]
        if late:
            raise Refused(f"%{late[0].name} may write to what the layers behind would take")
        for layer, affine in self._targets(norm, norm.result, norm.affine, norm.rank):
            if layer.touches_padding and affine.has_shift:
                raise Refused(f"the shift does not reach what %{layer.node.name} pads with")
            self._folded_input(layer, affine, norm)
        self._drop(norm, norm.input)

    def _by_halves(self, norm: Norm) -> None:
        """Give the scale to the layers behind, and leave the shift where the norm was."""
        scale, known = norm.affine.scale, type_of(norm.result)
        if not isinstance(known, TensorType):
            raise Refused(f"the type of %{norm.input.name} is not known; give args")
        if not bool((scale > 0).all()):
            raise Refused("a scale is not positive")
        shift = (norm.affine.shift / scale).to(known.dtype)
        if not bool(shift.isfinite().all()):
            raise Refused("a scale is too small to divide by")
        shift = shift.reshape(-1, *(1,) * (len(known.shape) - 2))
        alone = replace(norm.affine, shift=torch.zeros_like(scale))
        for layer, affine in self._targets(norm, norm.result, alone, norm.rank):
            self._folded_input(layer, affine, norm)
        read = self._keep(f"{norm.node.name}_shift", shift, norm.node, norm, norm.affine.key, ())
        is_aten = isinstance(norm.node.target, OpOverload)
        add = torch.ops.aten.add.Tensor if is_aten else torch.add
        with self.edit.on_behalf_of([norm.node], "fold_batch_norm"):
            moved = self.edit.call(add, norm.input, read, before=norm.node)
        made = infer_type(moved)
        if not isinstance(made, TensorType):
            raise Refused(f"the type of %{norm.input.name} is not known; give args")
        set_type(moved, replace(known, stride=made.stride))
        self.weights.inserted(moved)
        self._drop(norm, moved)

    # Where a norm can go.

    def _sources(
        self, norm: Norm, value: fx.Node, affine: Affine, user: fx.Node, axis: int
    ) -> list[Share]:
        """Return the layers that have to take the norm, each with its share.

        Args:
            norm: The norm.
            value: What would be normalised.
            affine: The norm as it is there.
            user: The node through which the norm came.
            axis: Where the value has its channels.
        """
        others = [u for u in value.users if u is not user]
        if others:
            raise Refused(f"%{value.name} is used by %{others[0].name} too")
        layer, call = layer_of(value, self.weights), resolve(value)
        if isinstance(layer, Layer):
            self._check_output(layer, affine, norm, axis)
            return [(layer, affine)]
        if call is not None and call.name == "aten.cat":
            return self._sources_of_parts(norm, value, call, affine, axis)
        assert norm.rank is not None
        inner = None if call is None else turned(call, axis, norm.rank)
        if call is not None and inner is not None:
            operand, axis = only_operand(value, call), inner
        else:
            operand = None if call is None or axis != 1 else before(value, call, affine)
        if operand is None:
            raise Refused(layer)
        return self._sources(norm, operand, affine, value, axis)

    def _sources_of_parts(
        self, norm: Norm, value: fx.Node, call: Call, affine: Affine, axis: int
    ) -> list[Share]:
        dim = call.arguments["dim"]
        if not isinstance(dim, int) or norm.rank is None or dim % norm.rank != axis:
            raise Refused(f"%{value.name} joins along another axis than that of the channels")
        found, start = [], 0
        for part in call.arguments["tensors"]:
            known = type_of(part)
            if not isinstance(known, TensorType) or len(known.shape) != norm.rank:
                raise Refused(f"the type of %{part.name} is not known")
            size = known.shape[axis]
            found += self._sources(norm, part, affine.part(start, size), value, axis)
            start += size
        return found

    def _check_output(self, layer: Layer, affine: Affine, norm: Norm, axis: int) -> None:
        """Refuse a layer whose channels are not those of the norm, or that runs otherwise."""
        self._check_mode(layer, norm)
        if affine.scale.numel() != layer.out_channels:
            raise Refused(f"%{layer.node.name} has {layer.out_channels} channels, not as many")
        assert norm.rank is not None
        is_there = (
            axis == 1 and norm.rank == layer.axes + 2 if layer.axes else axis == norm.rank - 1
        )
        if not is_there:
            raise Refused(f"the channels of %{layer.node.name} lie along another axis")

    def _targets(self, norm: Norm, value: fx.Node, affine: Affine, rank: int | None) -> list[Share]:
        """Return the layers that take what the norm gives, each with the norm as it is there."""
        if not value.users:
            raise Refused(f"nobody uses %{value.name}")
        found: list[Share] = []
        for user in value.users:
            layer, call = layer_of(user, self.weights), resolve(user)
            if isinstance(layer, Layer):
                self._check_input(layer, value, affine, rank, norm)
                found.append((layer, affine))
                continue
            moved = None if call is None else behind(user, call, affine)
            if call is None or moved is None:
                raise Refused(f"%{value.name} is used by %{user.name}, which lets no norm through")
            if call.name.endswith("_") and len(value.users) > 1:
                raise Refused(f"%{user.name} writes to what others use")
            known = type_of(user)
            inner = len(known.shape) if isinstance(known, TensorType) else rank
            found += self._targets(norm, user, moved, inner)
        return found

    def _check_input(
        self, layer: Layer, value: fx.Node, affine: Affine, rank: int | None, norm: Norm
    ) -> None:
        name = layer.node.name
        if layer.input is not value or any(
            operand is value for operand in (layer.weight_operand, layer.bias_operand)
        ):
            raise Refused(f"%{name} takes %{value.name} as a weight")
        self._check_mode(layer, norm)
        if rank != layer.axes + 2 or affine.scale.numel() != layer.in_channels:
            raise Refused(f"the channels of %{name} are not known to be those of the norm")

    def _check_mode(self, layer: Layer, norm: Norm) -> None:
        first, last = sorted((layer.node, norm.node), key=order_key)
        mode = self.weights.order.mode_between(first, last)
        if mode is not None:
            raise Refused(f"%{mode.name} changes a mode between it and %{layer.node.name}")
        if not layer.weight.dtype.is_floating_point or not layer.weight.numel():
            raise Refused(f"the weight of %{layer.node.name} is not real, or empty")

    # What is folded.

    def _folded_output(self, layer: Layer, affine: Affine, norm: Norm) -> fx.Node:
        """Replace a layer by one with the norm behind it folded in."""
        scale, shift = (n.to(layer.weight.device) for n in (affine.scale, affine.shift))
        weight = layer.as_groups(layer.weight.double()) * layer.over_outputs(scale)
        bias = shift if layer.bias is None else layer.bias.double() * scale + shift
        return self._replace(layer, weight, bias, norm, ("output", *affine.key))

    def _folded_input(self, layer: Layer, affine: Affine, norm: Norm) -> fx.Node:
        """Replace a layer by one with the norm in front of it folded in."""
        scale, shift = (n.to(layer.weight.device) for n in (affine.scale, affine.shift))
        grouped = layer.as_groups(layer.weight.double())
        bias = None if layer.bias is None else layer.bias.double()
        if affine.has_shift:
            added = layer.sum_over_inputs(grouped * layer.over_inputs(shift))
            bias = added if bias is None else bias + added
        weight = grouped * layer.over_inputs(scale)
        return self._replace(layer, weight, bias, norm, ("input", *affine.key))

    def _replace(
        self, layer: Layer, weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm, how: Any
    ) -> fx.Node:
        """Replace a layer by one with other numbers.

        Args:
            layer: The layer.
            weight: float64, in the form of `layer.as_groups(layer.weight)`.
            bias: float64[out], or None.
            norm: The norm that is folded.
            how: What makes these numbers out of the layer's own.
        """
        node, old = layer.node, layer.weight
        shaped = torch.empty_like(old).copy_(weight.reshape(old.shape))
        bias = None if bias is None else bias.to(old.dtype)
        if _is_out_of_range(shaped, old) or _is_out_of_range(bias, layer.bias):
            raise Refused(f"the folded weight of %{node.name} is out of range")
        key = (memory_of(old), memory_of(layer.bias), how)
        made_of = (layer.weight_operand, layer.bias_operand)
        weight_read = self._keep(f"{node.name}_weight", shaped, node, norm, key, made_of)
        bias_read = None
        if bias is not None:
            bias_read = self._keep(f"{node.name}_bias", bias, node, norm, key, made_of)
        with self.edit.on_behalf_of([node, norm.node], "fold_batch_norm"):
            new = layer.rebuild(self.edit, weight_read, bias_read, before=node)
            stand_where(new, node)
            self.weights.replaced(node, self.weights.inserted(new))
            self.edit.replace(node, new)
        return new

    def _keep(
        self, name: str, value: torch.Tensor, place: fx.Node, norm: Norm, key: Any, made_of: Any
    ) -> fx.Node:
        gradient = self.weights.needs_gradient(*norm.operands, *made_of)
        whole = (name.rpartition("_")[2], key, gradient, value.dtype, value.shape)
        with self.edit.on_behalf_of([place], "fold_batch_norm"):
            return self.weights.keep(name, value, key=whole, gradient=gradient, before=place)

    def _drop(self, norm: Norm, value: fx.Node) -> None:
        """Let the users of the norm use a value, and erase the norm."""
        value = self._laid_out(norm, value)
        self.edit.replace_uses(norm.result, value)
        self.weights.replaced(norm.result, value)
        self.edit.erase(norm.result)
        if norm.node is not norm.result:
            self.edit.erase(norm.node)

    def _laid_out(self, norm: Norm, value: fx.Node) -> fx.Node:
        """Return a value in the memory layout of the norm's result: itself, or a dense copy."""
        held, known = type_of(value), type_of(norm.result)
        if not isinstance(held, TensorType):
            return value
        if not isinstance(known, TensorType):
            if held.memory_format is None:
                raise Refused(f"it makes %{value.name} dense, which is not")
            return value
        if held.stride == known.stride:
            return value
        layout = known.memory_format
        if layout is None or held.shape != known.shape:
            raise Refused(f"it gives another memory layout than %{value.name} has")
        with self.edit.on_behalf_of([norm.node], "fold_batch_norm"):
            copied = self.edit.call(
                torch.ops.aten.clone.default, value, memory_format=layout, before=norm.node
            )
        set_type(copied, known)
        return self.weights.inserted(copied)


def _is_out_of_range(new: torch.Tensor | None, old: torch.Tensor | None) -> bool:
    """Tell whether numbers overflowed that were finite."""
    if new is None or bool(new.isfinite().all()):
        return False
    return old is None or bool(old.isfinite().all())
