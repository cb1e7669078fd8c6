"""Try a change, work out the types of what follows from it, and take it back where they don't fit.

Two tensors with equal numbers may still differ in memory layout. A pass that changes the layout of
a value asks here whether all that is computed from it can live with that, and whether the caller
gets what he got before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxkit.analysis.effects import effects_of
from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import TensorType, type_of


class Retyping:
    """Types that are worked out anew after a change, and what they were before it."""

    def __init__(self) -> None:
        self._before: dict[fx.Node, Any] = {}

    def spread(self, changed: Iterable[fx.Node]) -> str | None:
        """Work out the types of some nodes, and of all that follows as far as it changes.

        Cost: linear in the nodes whose operands got other types.

        Args:
            changed: Nodes that are new, or whose operands are.

        Returns:
            None when all went well; else why the new types can't be, and then the types are as
            they were before this call.
        """
        before: dict[fx.Node, Any] = {}
        reason = _spread(changed, before)
        if reason is not None:
            _restore(before)
            return reason
        for node, known in before.items():
            self._before.setdefault(node, known)
        return None

    def restore(self) -> None:
        """Bring back all types as they were at the beginning."""
        _restore(self._before)
        self._before.clear()


def _restore(before: dict[fx.Node, Any]) -> None:
    for node, known in before.items():
        if known is None:
            node.meta.pop(TYPE_KEY, None)
        else:
            node.meta[TYPE_KEY] = known


def _spread(changed: Iterable[fx.Node], before: dict[fx.Node, Any]) -> str | None:
    queue = [(node._sort_key, id(node), node) for node in dict.fromkeys(changed)]
    heapq.heapify(queue)
    queued = {node for _, _, node in queue}
    while queue:
        _, _, node = heapq.heappop(queue)
        if node.op == "output":
            return "the caller would get a tensor of another memory layout"
        old = type_of(node)
        before.setdefault(node, node.meta.get(TYPE_KEY))
        new = None if effects_of(node).is_opaque else infer_type(node)
        if new is None:
            return f"%{node.name} can't take operands of another memory layout"
        new = _with_gradient(node, new, old)
        node.meta[TYPE_KEY] = new
        if old is not None and pytree.tree_leaves(old) == pytree.tree_leaves(new):
            continue
        if old is not None and effects_of(node).writes:
            return f"%{node.name} writes to a tensor that would have another memory layout"
        for user in node.users:
            if user not in queued:
                queued.add(user)
                heapq.heappush(queue, (user._sort_key, id(user), user))
    return None


def _with_gradient(node: fx.Node, new: Any, old: Any) -> Any:
    """Say whether autograd follows: types are worked out without gradients."""
    before = pytree.tree_leaves(old)
    follows = any(_needs_gradient(type_of(operand)) for operand in node.all_input_nodes)
    leaves, spec = pytree.tree_flatten(new)
    told = [
        one.requires_grad if isinstance(one, TensorType) else follows
        for one in (before if len(before) == len(leaves) else [None] * len(leaves))
    ]
    kept = [
        replace(leaf, requires_grad=flag) if isinstance(leaf, TensorType) else leaf
        for leaf, flag in zip(leaves, told, strict=True)
    ]
    return pytree.tree_unflatten(kept, spec)


def _needs_gradient(known: Any) -> bool:
    leaves = pytree.tree_leaves(known)
    return any(isinstance(leaf, TensorType) and leaf.requires_grad for leaf in leaves)
