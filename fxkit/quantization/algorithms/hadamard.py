"""Rotate the inputs of linear layers, so that no channel is much larger than the others.

Sources: "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", Ashkboos et al., 2024, and, for the
random signs, "QuIP#: Even Better LLM Quantization with Hadamard Incoherence and Lattice Codebooks",
Tseng et al., 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.quantization.algorithms.scaled_inputs import groups, weight_of
from fxkit.quantization.operands import take_instead
from fxkit.quantization.preparation import Program, apply, graph_of
from fxkit.quantization.rotations import rotation


@dataclass(frozen=True)
class RotateInputs(Pass):
    """Multiply inputs of linear layers by an orthogonal matrix, and rows of weights as well.

    The matrix has blocks of H diag(signs), H a Hadamard matrix over the root of its size: the
    largest power of two that divides the input's channels, up to `size`. Layers with one input
    share a rotation. Inputs with an odd number of channels stay.

    Rewrites:
        %y = aten.linear(%x, %w)
        →
        %u = aten.unflatten(%x, -1, (k / n, n)); %r = aten.matmul(%u, %h)
        %f = aten.flatten(%r, -2); %y = aten.linear(%f, %w · blocks of %h)

    Attributes:
        size: Rows of a block at most, a power of two; a product with them is what it costs.
        seed: What the signs are drawn with.
    """

    size: int = 128
    seed: int = 0

    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rotate each input that linear layers take. Cost: that of the weights, times `size`."""
        for producer, layers in groups(edit.gm).items():
            weight = weight_of(edit.gm, layers[0])
            block = min(weight.shape[1] & -weight.shape[1], self.size)
            if block > 1 and weight.dtype.is_floating_point:
                self._rotate(edit, producer, layers, block)

    def _rotate(
        self, edit: EditSession, producer: fx.Node, layers: list[fx.Node], block: int
    ) -> None:
        first, matrix = layers[0], rotation(block, self.seed)
        weight = weight_of(edit.gm, first)
        channels, dtype = weight.shape[1], weight.dtype
        with edit.on_behalf_of(layers, "rotate_inputs"):
            read = edit.add_attribute("rotation", matrix.to(weight), before=first)
            value = producer
            if channels > block:
                parts = (channels // block, block)
                value = edit.call(torch.unflatten, value, -1, parts, before=first)
            value = edit.call(torch.matmul, value, read, before=first)
            if channels > block:
                value = edit.call(torch.flatten, value, -2, before=first)
            for layer in layers:
                rows = weight_of(edit.gm, layer).detach().double().unflatten(1, (-1, block))
                rotated = (rows @ matrix.to(rows.device)).flatten(1).to(dtype)
                new = edit.add_attribute("rotated_weight", rotated, before=layer)
                call = resolve(layer)
                assert call is not None
                old = call.arguments["weight"]
                take_instead(edit, layer, {producer: value, old: new})
                if not old.users:
                    edit.erase(old)


def rotate_inputs(
    model: Any,
    args: tuple[Any, ...] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    size: int = 128,
    seed: int = 0,
) -> Program:
    """Return a program that computes what a model does, with rotated inputs of linear layers.

    A few large channels are spread over the `size` channels of a block, in activations and in
    weights. No data is needed; each input costs a product with `size` columns, which stays in
    floating point.

    Args:
        model: A module, function, captured program or `torch.fx.GraphModule`.
        args: Example inputs to capture with.
        kwargs: Example keyword inputs.
        size: Channels that are mixed, a power of two.
        seed: What the signs are drawn with.

    Raises:
        CaptureError: When the model is not one graph.
        UnsupportedError: When `size` is not a power of two above 1.
    """
    if size < 2 or size & (size - 1):
        raise UnsupportedError(f"expected a power of two above 1 as the size, got {size}")
    return apply(graph_of(model, args, kwargs), RotateInputs(size, seed))
