"""Work out the types of what follows from a change, and take it back where they don't fit.

Two tensors with equal numbers may still differ in memory layout. A pass that changes the layout of
a value asks here whether all that is computed from it can live with that, and whether the caller
gets what he got before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.analysis.tensor_types import infer_type
from fxkit.analysis.type_inference.type_facts import symbols_in
from fxkit.ir.session import EditSession
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fx_nodes import order_key


def propagate_types(session: EditSession, made: Iterable[fx.Node]) -> None:
    """Record the types of new nodes that differ from those of what they replace, and what follows.

    A new node that can't be run on tensors without data keeps the type of what it replaces; where
    another node can't, its type is not known any more. Cost: linear in the nodes that are visited,
    those that are new or take what got another type.

    Args:
        session: The session that made them.
        made: The nodes, with the types of what they replace.
    """
    queue = _Queue(made)
    new = set(made)
    for node in queue:
        old = node.meta.get(TYPE_KEY)
        if old is None:
            continue
        now = _inferred(node, old)
        node.meta[TYPE_KEY] = old
        if now is None and node in new:
            continue
        if now is not None and pytree.tree_leaves(old) == pytree.tree_leaves(now):
            continue
        session.retype(node, now)
        queue.push(node.users)


def _inferred(node: fx.Node, old: Any) -> Any:
    """Return a node's type by those of its operands; None where they, or it, can't be known."""
    is_known = all(type_of(operand) is not None for operand in node.all_input_nodes)
    if node.op == "output" or not is_known or effects_of(node).is_opaque:
        return None
    now = infer_type(node)
    if now is None or (symbols_in(now) and not symbols_in(old)):  # the data decide sizes
        return None
    return _with_gradient(node, now, old)


class Retyping:
    """Types that are worked out anew after a change, and what they were before it."""

    def __init__(self) -> None:
        self._before: dict[fx.Node, Any] = {}

    def propagate(self, changed: Iterable[fx.Node]) -> str | None:
        """Work out the types of some nodes, and of all that follows as far as it changes.

        Cost: linear in the nodes whose operands got other types.

        Args:
            changed: Nodes that are new, or whose operands are.

        Returns:
            None when all went well; else why the new types can't be, and then the types are as
            they were before this call.
        """
        before: dict[fx.Node, Any] = {}
        reason = _propagate(changed, before)
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


def _propagate(changed: Iterable[fx.Node], before: dict[fx.Node, Any]) -> str | None:
    queue = _Queue(changed)
    for node in queue:
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
        queue.push(node.users)
    return None


class _Queue:
    """Nodes to visit in the order of the graph, each once."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._heap: list[tuple[Any, int, fx.Node]] = []
        self._queued: set[fx.Node] = set()
        self.push(nodes)

    def push(self, nodes: Iterable[fx.Node]) -> None:
        """Add what has not been in the queue."""
        for node in nodes:
            if node not in self._queued:
                self._queued.add(node)
                heapq.heappush(self._heap, (order_key(node), id(node), node))

    def __iter__(self) -> Iterator[fx.Node]:
        while self._heap:
            yield heapq.heappop(self._heap)[2]


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
