"""Divide channels of the input of linear layers, and multiply the weights' columns by as much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxkit.analysis.objects import graph
from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.quantization.operands import take_instead


@dataclass(frozen=True)
class ScaleInputs(Pass):
    """Divide channels of the inputs of linear layers by factors that are given.

    Linear layers with one input share its factors.

    Rewrites:
        %y = aten.linear(%x, %w)  →  %d = aten.mul(%x, 1 / s); %y = aten.linear(%d, %w * s)

    Attributes:
        factors: float64[channels] by the name of the node that makes an input.
    """

    factors: Mapping[str, Tensor] = field(default_factory=dict)

    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rewrite each group of layers whose input has factors. Cost: that of the weights."""
        for producer, layers in groups(edit.gm).items():
            factors = self.factors.get(producer.name)
            if factors is not None and factors.numel() == weight_of(edit.gm, layers[0]).shape[1]:
                divide(edit, producer, layers, factors)


def divide(edit: EditSession, producer: fx.Node, layers: list[fx.Node], factors: Tensor) -> None:
    """Divide channels of what a node makes where some layers take it, and scale their weights.

    Args:
        edit: The session.
        producer: Makes the input of the layers.
        layers: Linear layers with stored weights.
        factors: float64[channels], positive.
    """
    with edit.on_behalf_of(layers, edit.by):
        first = layers[0]
        dtype = weight_of(edit.gm, first).dtype
        inverse = edit.add_attribute("smoothing", (1 / factors).to(dtype), before=first)
        divided = edit.call(torch.mul, producer, inverse, before=first)
        for layer in layers:
            scaled = (weight_of(edit.gm, layer).detach().double() * factors).to(dtype)
            read = edit.add_attribute("smoothed_weight", scaled, before=layer)
            old = _operand(layer, "weight")
            take_instead(edit, layer, {producer: divided, old: read})
            if not old.users:
                edit.erase(old)


def groups(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Return the linear layers with stored weights, by the node that makes their input."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph(gm).find(F.linear):
        layer = node.fx_node
        weight, operand = _operand(layer, "weight"), _operand(layer, "input")
        if not isinstance(weight, fx.Node) or not isinstance(operand, fx.Node):
            continue
        if weight.op == "get_attr" and operand.op != "get_attr" and weight_of(gm, layer).ndim == 2:
            found.setdefault(operand, []).append(layer)
    return found


def weight_of(gm: fx.GraphModule, layer: fx.Node) -> Tensor:
    """Return the weight of a linear layer, which is stored."""
    return find_attribute(gm, str(_operand(layer, "weight").target))


def _operand(layer: fx.Node, name: str) -> Any:
    call = resolve(layer)
    return None if call is None else call.arguments[name]
