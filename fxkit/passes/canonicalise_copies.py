"""Put copies in the place of calls that copy where they could have returned a view."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxkit.analysis.cost import copies
from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext

_RESHAPES = frozenset(("aten.reshape", "aten.reshape_as", "aten.flatten", "aten.ravel"))


@dataclass(frozen=True)
class CanonicaliseCopies(Pass):
    """Replace a reshape, or a `contiguous`, that can't return a view by a copy and a view of that.

    Where elements end up is then known, and a kernel may write them there. A call that returns a
    view, or its operand, stays.

    Rewrites:
        %t = aten.t(%x); return aten.reshape(%t, [6])
            →  %t = aten.t(%x); %c = aten.clone(%t, …); return aten._unsafe_view(%c, [6])
        %t = aten.t(%x); return aten.contiguous(%t)
            →  %t = aten.t(%x); return aten.clone(%t, …)
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the nodes."""
        for node in list(edit.graph.nodes):
            with edit.on_behalf_of([node], "canonicalise_copies"):
                _canonicalise(node, edit)


def _canonicalise(node: fx.Node, edit: EditSession) -> None:
    call, known = resolve(node), type_of(node)
    if call is None or not isinstance(known, TensorType):
        return
    is_reshape = call.name in _RESHAPES
    if not is_reshape and call.name != "aten.contiguous":
        return
    if not copies(node):
        return
    kind = call.arguments.get("memory_format") or torch.contiguous_format
    new = edit.call(
        torch.ops.aten.clone.default, call.arguments["self"], memory_format=kind, before=node
    )
    infer_type(new)
    if is_reshape:
        # As `reshape` does: nobody can ask the result for the copy that it is a view of.
        new = edit.call(torch.ops.aten._unsafe_view.default, new, list(known.shape), before=node)
        infer_type(new)
    edit.replace(node, new)
