"""Batch norms behind layers whose weights are quantised: they belong to the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.quantization.operand_table import OPERATORS
from fxkit.quantization.operands import take_instead
from fxkit.quantization.placement import QuantizedOperator

_LAYERS = ("aten.linear", "aten.conv1d", "aten.conv2d", "aten.conv3d")


@dataclass(frozen=True)
class NormedLayer:
    """A layer and the batch norm that alone takes its result.

    Attributes:
        layer: The call of the layer.
        norm: The call of the norm.
        weight: The node that reads the layer's weight.
        variance: The node that reads the norm's running variance.
        scale: The node that reads its weight, or None.
        eps: What it adds to the variance.
    """

    layer: fx.Node
    norm: fx.Node
    weight: fx.Node
    variance: fx.Node
    scale: fx.Node | None
    eps: float

    @property
    def folded(self) -> str:
        """A name for the weight with the norm folded in, the same in each graph of a program."""
        norm = str(self.variance.target).rpartition(".")[0]
        return f"{self.weight.target}_of_{norm}".replace(".", "_")


def normed_layers(graph: fx.Graph, placed: tuple[QuantizedOperator, ...]) -> dict[str, NormedLayer]:
    """Return the layers with a quantised weight and a batch norm behind, by their names.

    Args:
        graph: The graph, of known types.
        placed: What is decided for its operators.
    """
    takes = {p.node for p in placed if any(operand.is_weight for operand in p.operands)}
    found = {}
    for node in graph.nodes:
        pair = _pair(node)
        if pair is not None and pair.layer.name in takes:
            found[pair.layer.name] = pair
    return found


def _pair(node: fx.Node) -> NormedLayer | None:
    call = resolve(node)
    if call is None or call.name != "aten.batch_norm":
        return None
    arguments = call.arguments
    layer, variance = arguments["input"], arguments["running_var"]
    inner = resolve(layer) if isinstance(layer, fx.Node) else None
    is_alone = inner is not None and inner.name in _LAYERS and len(layer.users) == 1
    if inner is None or not is_alone or not _is_read(variance):
        return None
    weight, scale = inner.arguments[OPERATORS[inner.name].weight or ""], arguments["weight"]
    known = type_of(layer)
    is_by_channel = "conv" in inner.name or (
        isinstance(known, TensorType) and len(known.shape) == 2
    )
    is_batched = isinstance(known, TensorType) and (
        "conv" not in inner.name or len(known.shape) == int(inner.name[-2]) + 2
    )
    if not _is_read(weight) or not is_by_channel or not is_batched:
        return None
    if scale is not None and not _is_read(scale):
        return None
    return NormedLayer(layer, node, weight, variance, scale, float(arguments["eps"]))


def _is_read(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


def fold(edit: EditSession, pair: NormedLayer) -> None:
    """Put a norm's running statistics into the weight and bias of its layer, and erase the norm."""
    norm, layer = resolve(pair.norm), resolve(pair.layer)
    assert norm is not None and layer is not None

    def read(node: fx.Node | None) -> Tensor | None:
        return None if node is None else find_attribute(edit.gm, str(node.target)).detach()

    weight, variance = read(pair.weight), read(pair.variance)
    mean = read(norm.arguments["running_mean"])
    assert weight is not None and variance is not None and mean is not None
    scale, shift = read(pair.scale), read(norm.arguments["bias"])
    factor = (variance.double() + pair.eps).rsqrt()
    factor = factor if scale is None else factor * scale.double()
    old = layer.arguments["bias"]
    bias = read(old)
    moved = (-mean.double() if bias is None else bias.double() - mean.double()) * factor
    moved = moved if shift is None else moved + shift.double()
    folded = weight.double() * factor.reshape(-1, *(1,) * (weight.ndim - 1))
    with edit.on_behalf_of([pair.layer, pair.norm], "fold_batch_norm"):
        new = edit.add_attribute(pair.folded, folded.to(weight.dtype), before=pair.layer)
        added = edit.add_attribute(
            f"{pair.layer.name}_bias", moved.to(weight.dtype), before=pair.layer
        )
        if isinstance(old, fx.Node):
            take_instead(edit, pair.layer, {pair.weight: new, old: added})
        else:
            take_instead(edit, pair.layer, {pair.weight: new})
            _give_bias(edit, pair.layer, added)
    edit.replace_uses(pair.norm, pair.layer)
    edit.erase(pair.norm)


def _give_bias(edit: EditSession, layer: fx.Node, bias: fx.Node) -> None:
    args = list(layer.args)
    if len(args) > 2:
        args[2] = bias
        edit.set_args(layer, tuple(args), dict(layer.kwargs))
    else:
        edit.set_args(layer, tuple(args), {**layer.kwargs, "bias": bias})


def of_normed_weight(eps: float, ndim: int, weight: Tensor, variance: Tensor, scale: Any) -> Any:
    """Return the weight with a norm's running scale folded in, and that scale by channel.

    Args:
        eps: What the norm adds to its variance.
        ndim: Of the weight.
        weight: float[channels, ...].
        variance: float[channels], the norm's running variance.
        scale: float[channels], its weight, or None.
    """
    factor = (variance + eps).rsqrt()
    factor = (factor if scale is None else factor * scale).reshape(-1, *(1,) * (ndim - 1))
    return weight * factor, factor


def of_plain_weight(rounded: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    """Return a rounded weight without the norm's scale; the weight itself where that is 0."""
    is_gone = factor == 0
    return torch.where(is_gone, weight, rounded / factor.masked_fill(is_gone, 1.0))
