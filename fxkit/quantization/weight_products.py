"""Matrix products with a parameter become calls of linear, which are quantised as layers are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.quantization.rotations import is_rotation

# Product → its left operand, its right operand, and what is added.
_OPERANDS = {
    "aten.addmm": ("mat1", "mat2", "self"),
    "aten.mm": ("self", "mat2", ""),
    "aten.matmul": ("self", "other", ""),
}


@dataclass(frozen=True)
class CallLinear(Pass):
    """Call linear where a matrix product takes a parameter, or what is made of parameters alone.

    So do GPT-2's layers. Torch computes the same product for both, bit for bit.

    Rewrites:
        %y = aten.addmm(%b, %x, self.weight)
        →
        %t = aten.t(self.weight); %y = aten.linear(%x, %t, %b)
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges."""
        stored: dict[fx.Node, bool] = {}
        for node in list(edit.graph.nodes):
            operands = node.all_input_nodes
            stored[node] = node.op == "get_attr" or (
                node.op.startswith("call") and bool(operands) and all(map(stored.get, operands))
            )
            call = resolve(node)
            if call is None or call.name not in _OPERANDS or stored[node]:
                continue
            left, right, added = (call.arguments.get(name) for name in _OPERANDS[call.name])
            if not isinstance(right, fx.Node) or not stored.get(right) or _is_rotation(right):
                continue
            if _is_layer(call, left, right, added):
                with edit.on_behalf_of([node], "call_linear"):
                    edit.replace(node, _linear(edit, node, left, right, added))


def _linear(edit: EditSession, node: fx.Node, left: Any, right: fx.Node, added: Any) -> fx.Node:
    """Return the call of linear that stands for a product."""

    def call(target: Any, *args: Any) -> fx.Node:
        made = edit.call(target, *args, before=node)
        infer_type(made)
        return made

    known = type_of(added) if added is not None else None
    if isinstance(known, TensorType) and len(known.shape) == 2:
        added = call(torch.flatten, added)
    return call(F.linear, left, call(torch.t, right), added)


def _is_layer(call: Call, left: Any, right: Any, added: Any) -> bool:
    """Tell whether a product is what a linear layer computes."""
    x, weight = type_of(left), type_of(right)
    if not isinstance(x, TensorType) or not isinstance(weight, TensorType):
        return False
    if len(weight.shape) != 2 or len(x.shape) < 2 or not _has_no_factors(call.arguments):
        return False
    if added is None:
        return True
    bias, columns = type_of(added), weight.shape[1]
    return isinstance(bias, TensorType) and tuple(bias.shape) in ((columns,), (1, columns))


def _is_rotation(node: fx.Node) -> bool:
    if node.op != "get_attr":
        return False
    found = find_attribute(node.graph.owning_module, str(node.target))
    return isinstance(found, torch.Tensor) and is_rotation(found)


def _has_no_factors(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("beta", 1) == 1 and arguments.get("alpha", 1) == 1
