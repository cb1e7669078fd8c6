"""Let the channels between two layers have ranges of one size.

Source: "Data-Free Quantization Through Weight Equalization and Bias Correction", Nagel et al.,
2019, section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.fold_batch_norm import FoldBatchNorm
from fxkit.quantization.operands import take_instead
from fxkit.quantization.preparation import Program, apply, graph_of

ROUNDS = 20
"""Times that all pairs are visited, at most."""
SETTLED = 1e-3
"""Factors as near to 1 as this end it."""

_LAYERS = ("aten.linear", "aten.conv1d", "aten.conv2d", "aten.conv3d")
_ALIKE = ("aten.relu", "aten.leaky_relu", "aten.dropout", "aten.contiguous")
_POOLS = tuple(
    f"aten.{kind}{axes}d"
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
    for axes in (1, 2, 3)
)


@dataclass(frozen=True)
class EqualizeLayers(Pass):
    """Divide the channels of a layer's result, and multiply the next layer's weight by as much.

    Between the two may lie what gives k times its result for k times its operand, k > 0: relu,
    leaky_relu, pooling, flattening. Only the next layer takes the result. For channel i with ranges
    r1 and r2 of both weights the factor is sqrt(r1 r2) / r2, so that both ranges are sqrt(r1 r2);
    chains of layers are visited until nothing moves. No data is needed.

    Rewrites:
        %a = aten.linear(%x, %w1, %b1); %r = aten.relu(%a); %y = aten.linear(%r, %w2)
        →
        %a = aten.linear(%x, %w1 / s, %b1 / s); %r = aten.relu(%a); %y = aten.linear(%r, %w2 * s)
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Scale the weights until they are settled. Cost: linear in the weights for each round."""
        pairs = _pairs(edit.gm)
        weights = {layer: _Weights.of(edit.gm, layer) for pair in pairs for layer in pair}
        changed: set[fx.Node] = set()
        for _ in range(ROUNDS):
            largest = 0.0
            for first, second in pairs:
                factors = weights[first].factors(weights[second])
                move = float((factors - 1).abs().max())
                if move > SETTLED:
                    weights[first].divide(factors)
                    weights[second].multiply(factors)
                    changed |= {first, second}
                largest = max(largest, move)
            if largest <= SETTLED:
                break
        for layer, values in weights.items():
            if layer in changed:
                values.write(edit, layer)


def equalize(
    model: Any, args: tuple[Any, ...] = (), *, kwargs: Mapping[str, Any] | None = None
) -> Program:
    """Return a program that computes what a model does, with weights of even ranges.

    Batch norms are folded first. It helps weights that have one scale each, where rows differ by
    much: depthwise convolutions above all; it needs relu or the like between layers. What clips, as
    relu6 does, stops it.

    Args:
        model: A module, function, captured program or `torch.fx.GraphModule`.
        args: Example inputs to capture with.
        kwargs: Example keyword inputs.

    Raises:
        CaptureError: When the model is not one graph.
    """
    program = graph_of(model, args, kwargs)
    return apply(apply(program, FoldBatchNorm()), EqualizeLayers())


@dataclass
class _Weights:
    """Weight and bias of a layer while they are scaled, float64."""

    weight: Tensor
    bias: Tensor | None
    groups: int

    @classmethod
    def of(cls, gm: fx.GraphModule, layer: fx.Node) -> _Weights:
        call = resolve(layer)
        assert call is not None
        weight, bias = (_stored(gm, call.arguments.get(name)) for name in ("weight", "bias"))
        assert weight is not None
        return cls(weight, bias, int(call.arguments.get("groups", 1)))

    def factors(self, behind: _Weights) -> Tensor:
        """Return what channels between this layer and another one are divided by, float64[n]."""
        mine = self.weight.flatten(1).abs().amax(1)
        theirs = behind.columns().abs().amax((1, 3)).reshape(mine.numel(), -1).amax(1)
        factors = (mine / theirs).sqrt()
        return factors.where((mine > 0) & (theirs > 0) & factors.isfinite(), 1.0)

    def columns(self) -> Tensor:
        """Return the weight as [groups, out, in, kernel]."""
        shape = (self.groups, -1, self.weight.shape[1])
        return self.weight.reshape(*shape, self.weight[0, 0].numel())

    def divide(self, factors: Tensor) -> None:
        self.weight = self.weight / factors.reshape(-1, *(1,) * (self.weight.ndim - 1))
        self.bias = None if self.bias is None else self.bias / factors

    def multiply(self, factors: Tensor) -> None:
        columns = self.columns()
        inputs = columns.shape[0] * columns.shape[2]
        wide = factors.repeat_interleave(inputs // factors.numel())
        self.weight = (columns * wide.reshape(self.groups, 1, -1, 1)).reshape(self.weight.shape)

    def write(self, edit: EditSession, layer: fx.Node) -> None:
        """Let the layer read these numbers."""
        call, new = resolve(layer), {}
        assert call is not None
        with edit.on_behalf_of([layer], "equalize_layers"):
            for name, value in (("weight", self.weight), ("bias", self.bias)):
                old = call.arguments.get(name)
                if value is not None and isinstance(old, fx.Node):
                    kept = find_attribute(edit.gm, str(old.target))
                    value = value.to(kept.dtype)
                    new[old] = edit.add_attribute(f"equalized_{name}", value, before=layer)
            take_instead(edit, layer, new)
            for old in new:
                if not old.users:
                    edit.erase(old)


def _pairs(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Return layers whose result goes into one other layer alone, with that layer."""
    found = []
    for node in gm.graph.nodes:
        if _is_layer(gm, node):
            behind = _layer_behind(gm, node)
            if behind is not None:
                found.append((node, behind))
    return found


def _is_layer(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node is a layer whose weight is stored, and whose bias is or is none."""
    call = resolve(node)
    if call is None or call.name not in _LAYERS:
        return False
    weight, bias = (_stored(gm, call.arguments.get(name)) for name in ("weight", "bias"))
    has_bias = call.arguments.get("bias") is not None
    return weight is not None and bool(weight.numel()) and (bias is not None) == has_bias


def _layer_behind(gm: fx.GraphModule, first: fx.Node) -> fx.Node | None:
    """Return the one layer that takes a layer's result, or None; flattened channels are runs."""
    call = resolve(first)
    assert call is not None
    kind = call.name
    wanted, node = kind, first
    while len(node.users) == 1:
        (user,) = node.users
        call = resolve(user)
        if call is None:
            return None
        if _is_layer(gm, user):
            is_fitting = call.name == wanted and call.arguments.get("input") is node
            inputs, outputs = _in_channels(gm, user), _out_channels(gm, first)
            fits = inputs == outputs or (wanted != kind and inputs % outputs == 0)
            return user if is_fitting and fits else None
        if call.name == "aten.flatten" and wanted == kind != "aten.linear":
            ends = call.arguments["start_dim"], call.arguments["end_dim"]
            if ends != (1, -1) or not _is_batched(first, kind):
                return None
            wanted = "aten.linear"
        elif call.name.removesuffix("_") not in (_ALIKE + _POOLS if "conv" in wanted else _ALIKE):
            return None
        node = user
    return None


def _is_batched(convolution: fx.Node, operator: str) -> bool:
    known = type_of(convolution)
    axes = int(operator.removeprefix("aten.conv")[0])
    return isinstance(known, TensorType) and len(known.shape) == axes + 2


def _out_channels(gm: fx.GraphModule, layer: fx.Node) -> int:
    return _Weights.of(gm, layer).weight.shape[0]


def _in_channels(gm: fx.GraphModule, layer: fx.Node) -> int:
    values = _Weights.of(gm, layer)
    return values.weight.shape[1] * values.groups


def _stored(gm: fx.GraphModule, operand: object) -> Tensor | None:
    """Return what an operand reads from the module, float64, or None."""
    if not isinstance(operand, fx.Node) or operand.op != "get_attr":
        return None
    value = find_attribute(gm, str(operand.target))
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().double() if is_real else None
