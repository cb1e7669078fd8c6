"""Products of integers on a GPU: torch's library multiplies, and kernels compute what is around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.moved_integers import TO_SIGNED, add_call, signed_bytes
from fxkit.lower.compiling.quantized_operands import MOST_TERMS
from fxkit.lower.compiling.stored_nibbles import GroupedWeight
from fxkit.lower.compiling.token_scales import Factor, aten
from fxkit.lower.families.integer_products.custom_op import NAME
from fxkit.passes.base import Pass, PassContext

# On a GPU, `torch._int_mm` takes more rows than 16, and other sizes that are multiples of 8.
FEWEST_ROWS = 17
_SIZE_STEP = 8


def reason_to_stay_float(layer: fx.Node, left: Factor, right: Factor | GroupedWeight) -> str | None:
    """Return why torch's library does not multiply the integers of a layer, or None.

    Args:
        layer: The layer.
        left: Its activations.
        right: Its weight.
    """
    if isinstance(right, GroupedWeight):
        return "its weight has a scale for each of several groups of a row"
    if left.is_float:
        return "its activations are floats"
    x, y = type_of(left.node), type_of(right.node)
    assert isinstance(x, TensorType) and isinstance(y, TensorType)
    columns, depth = y.shape
    if x.shape[-1] != depth:
        return "its operands do not fit"
    if depth > MOST_TERMS:
        return f"sums of {depth} products may need more than 32 bits"
    if columns % _SIZE_STEP or depth % _SIZE_STEP:
        return f"{columns} and {depth} features are not both multiples of {_SIZE_STEP}"
    return None


@dataclass(frozen=True)
class CallIntegerProducts(Pass):
    """Call torch's product of integers for each `fxkit.integer_product`.

    Torch multiplies signed bytes without zero points. What makes such bytes, and what subtracts
    the part of a zero point, are operators of their own, which share kernels with their neighbours.

    Rewrites:
        return fxkit.integer_product(%q, %t, None, 3)
        →
        %l = aten.to(aten.sub(aten.to(%q, torch.int16), 128), torch.int8)
        %m = aten._int_mm(%l, %t)
        %z = aten.mul(aten.sum(%t, [0], True, torch.int32), -125)
        return aten.sub(%m, %z)
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Replace each product. Cost: linear in the nodes."""
        for node in list(edit.graph.nodes):
            if type_of(node) is None and node.op != "output":
                infer_type(node)
            call = resolve(node)
            if call is not None and call.name == NAME:
                with edit.on_behalf_of([node], "call_integer_products"):
                    edit.replace(node, _Product(edit, node).spelled(**call.arguments))


class _Product:
    """Builds what stands for a product, right before it."""

    def __init__(self, edit: EditSession, node: fx.Node) -> None:
        self._edit = edit
        self._node = node

    def spelled(self, left: fx.Node, right: fx.Node, zeros: fx.Node | None, zero: int) -> fx.Node:
        """Return the node that computes the product."""
        known = type_of(left)
        assert isinstance(known, TensorType)
        rows = int(known.shape[0])
        point: fx.Node | int = zero if zeros is None else zeros
        if known.dtype == torch.uint8:
            left = signed_bytes(self._edit, self._node, left)
            point = self._moved(point)
        if rows < FEWEST_ROWS:
            left = self._call(aten.constant_pad_nd.default, left, [0, 0, 0, FEWEST_ROWS - rows])
        left = self._call(aten.contiguous.default, left)
        sums = self._call(aten._int_mm.default, left, right)
        if rows < FEWEST_ROWS:
            sums = self._call(aten.slice.Tensor, sums, 0, 0, rows)
        if point == 0:
            return sums
        by_column = self._call(aten.sum.dim_IntList, right, [0], True, dtype=torch.int32)
        return self._call(aten.sub.Tensor, sums, self._call(aten.mul.Tensor, by_column, point))

    def _moved(self, point: fx.Node | int) -> fx.Node | int:
        """Return the zero point of signed bytes."""
        if isinstance(point, int):
            return point - TO_SIGNED
        return self._call(aten.sub.Tensor, point, TO_SIGNED)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return add_call(self._edit, self._node, target, *args, **kwargs)
