"""Channels innermost, propagated through a graph that is about to be lowered."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.layout.layout_propagation import LayoutPropagation

# What warns of operands that are not contiguous.
_SEARCHES = frozenset(["aten.bucketize", "aten.searchsorted"])


class ImageLayoutPropagation(LayoutPropagation):
    """Lets what reads images whose channels lie innermost follow their layout."""

    def _needs_old_layout(self, node: fx.Node) -> bool:
        """Tell it of what eager computes more exactly in its layout, or without a warning."""
        call = resolve(node)
        if call is None or call.name.startswith("aten.conv") or call.name in _SEARCHES:
            return True
        if call.name == "aten.batch_norm" and call.arguments["training"] is not False:
            return True
        return super()._needs_old_layout(node)

    def _call(
        self, is_aten: bool, operand: fx.Node, options: dict[str, Any], place: fx.Node
    ) -> fx.Node:
        """Copy where `contiguous` would leave the strides as they are, as for one pixel."""
        known = type_of(operand)
        if not options and isinstance(known, TensorType) and _is_in_order(known):
            is_aten, options = True, {"memory_format": torch.contiguous_format}
        return super()._call(is_aten, operand, options, place)


def _is_in_order(known: TensorType) -> bool:
    """Tell whether elements lie in order, whatever the strides are where a size is one."""
    if known.stride is None:
        return False
    expected = 1
    for size, stride in zip(reversed(known.shape), reversed(known.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
