"""Weights that a program computes from its parameters become stored ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import fx

from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.constant_folding import ConstantFolding
from fxkit.quantization.operand_table import OPERATORS
from fxkit.quantization.operands import drop_unread


@dataclass(frozen=True)
class FoldWeights(Pass):
    """Compute once the weights that parameters alone determine, so that they are quantised as such.

    So it is with `torch.nn.utils.parametrizations`, with weights that are standardised, cast or
    transposed in each call.

    Rewrites:
        %w = aten._weight_norm_interface(%v, %g); %y = aten.conv1d(%x, %w)
            →  %y = aten.conv1d(%x, self._folded)
    """

    def drops_gradients(self) -> bool:
        """Tell that parameters are constants."""
        return True

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges, and that of computing weights."""
        if not any(map(_is_computed_weight, edit.graph.nodes)):
            return
        read = _reads(edit)
        ConstantFolding(
            max_bytes=sys.maxsize, fold_parameters=True, where=_is_computed_weight
        ).apply(edit, context)
        for path in read.keys() - _reads(edit).keys():
            drop_unread(edit, path)


def _reads(edit: EditSession) -> dict[str, fx.Node]:
    return {str(node.target): node for node in edit.graph.find_nodes(op="get_attr")}


def _is_computed_weight(node: fx.Node) -> bool:
    """Tell whether a node computes what an operator takes as its weight."""
    if node.op not in ("call_function", "call_method"):
        return False
    return any(_weight_of(user) is node for user in node.users)


def _weight_of(node: fx.Node) -> object:
    """Return the operand that an operator takes as its weight; None where there is none."""
    call = resolve(node)
    row = OPERATORS.get(call.name) if call is not None else None
    if call is None or row is None or row.weight is None:
        return None
    return call.arguments.get(row.weight)
