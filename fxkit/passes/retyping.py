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


def retype(changed: Iterable[fx.Node]) -> str | None:
    """Work out anew the types of some nodes and of all that follows as far as it changes.

    Cost: linear in the nodes whose operands changed their types.

    Args:
        changed: Nodes that are new or whose operands are others now. Of the nodes after them only
            those are visited whose operands got another type.

    Returns:
        None when all went well; else why the new types can't be, and then all types are as they
        were before.
    """
    before: dict[fx.Node, Any] = {}
    reason = _propagate(changed, before)
    if reason is not None:
        for node, known in before.items():
            if known is None:
                node.meta.pop(TYPE_KEY, None)
            else:
                node.meta[TYPE_KEY] = known
    return reason


def _propagate(changed: Iterable[fx.Node], before: dict[fx.Node, Any]) -> str | None:
    queue = [(node._sort_key, id(node), node) for node in dict.fromkeys(changed)]
    heapq.heapify(queue)
    queued = {node for _, _, node in queue}
    while queue:
        _, _, node = heapq.heappop(queue)
        if node.op == "output":
            return "the caller would get a tensor of another memory layout"
        old = node.meta.get(TYPE_KEY)
        before.setdefault(node, old)
        new = _inferred(node, old)
        if new is None:
            return f"%{node.name} can't take operands of another memory layout"
        if old is not None and _same(old, new):
            continue
        if old is not None and effects_of(node).writes:
            return f"%{node.name} writes to a tensor that would have another memory layout"
        for user in node.users:
            if user not in queued:
                queued.add(user)
                heapq.heappush(queue, (user._sort_key, id(user), user))
    return None


def _inferred(node: fx.Node, old: Any) -> Any:
    if effects_of(node).is_opaque:
        return None
    new = infer_type(node)
    if new is None:
        return None
    if old is not None:
        new = _with_gradient(new, old)
    else:
        follows = any(
            isinstance(known, TensorType) and known.requires_grad
            for operand in node.all_input_nodes
            for known in pytree.tree_leaves(type_of(operand))
        )
        new = pytree.tree_map_only(TensorType, lambda t: replace(t, requires_grad=follows), new)
    node.meta[TYPE_KEY] = new
    return new


def _with_gradient(new: Any, old: Any) -> Any:
    """Keep from the old type whether autograd follows: types are worked out without gradients."""
    news, spec = pytree.tree_flatten(new)
    olds = pytree.tree_leaves(old)
    if len(news) != len(olds):
        return new
    kept = [
        replace(n, requires_grad=o.requires_grad)
        if isinstance(n, TensorType) and isinstance(o, TensorType)
        else n
        for n, o in zip(news, olds, strict=True)
    ]
    return pytree.tree_unflatten(kept, spec)


def _same(old: Any, new: Any) -> bool:
    """Compare nested types; strides of axes of size one, and of empty tensors, count too."""
    return pytree.tree_leaves(old) == pytree.tree_leaves(new)
