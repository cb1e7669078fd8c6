"""Whether a node may move, two may be merged, a buffer is dead; and if not, why.

Everything is answered for the graph as it is: what is not known of a call counts as every effect.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import effects_of
from fxkit.analysis.shared_memory import memory_below
from fxkit.ir.numbers import number_key
from fxkit.ir.op import resolve
from fxkit.ir.op_table import GIVES_ITSELF
from fxkit.torch_adapters.fx_nodes import input_nodes_of


@dataclass(frozen=True)
class Verdict:
    """Yes, or no with a reason; true when it is yes.

    Attributes:
        reason: Why not, naming the node in the way; None when nothing is.
    """

    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return "yes" if self.reason is None else f"no: {self.reason}"


class Moves:
    """Answers for one graph.

    Args:
        graph: The graph. Cost: linear in its edges; the answers are for the graph as it was then.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order = EffectOrder(graph)
        self._output = next(iter(reversed(graph.nodes)))
        root = self.order.aliases.root
        outside = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
        self._shared = {root(n) for n in (*outside, *self._output.all_input_nodes)}
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._last_uses: dict[fx.Node, int] | None = None
        self._set: dict[fx.Node, bool] = {}

    def may_move(self, node: fx.Node, *, before: fx.Node) -> Verdict:
        """Tell whether a node may go right before another one.

        Cost: linear in the nodes between the two.
        """
        if node.op in ("placeholder", "output"):
            return Verdict(f"%{node.name} is {_PINNED[node.op]}, which has its place")
        if before.op == "placeholder":
            return Verdict(f"%{before.name} is an input, and nothing goes before one")
        current = node.next if node < before else before
        end = before if node < before else node
        while current is not end:
            if node in input_nodes_of(current):
                return Verdict(f"%{current.name} uses %{node.name}")
            if current in input_nodes_of(node):
                return Verdict(f"%{node.name} uses %{current.name}")
            if not self.order.may_swap(node, current):
                return Verdict(
                    f"%{node.name} ({effects_of(node).describe()}) may not change places with "
                    f"%{current.name} ({effects_of(current).describe()})"
                )
            current = current.next
        return Verdict()

    def may_merge(self, first: fx.Node, second: fx.Node) -> Verdict:
        """Tell whether the earlier of two nodes may stand for both.

        They must compute the same value, of operands that nobody wrote to in between, and nobody
        may be able to see that two tensors became one.
        """
        earlier, later = (first, second) if first < second else (second, first)
        for node in (earlier, later):
            if not effects_of(node).is_pure:
                return Verdict(f"%{node.name} is not pure: {effects_of(node).describe()}")
        key = merging_key(earlier)
        if key is None or key != merging_key(later):
            return Verdict(f"%{earlier.name} and %{later.name} do not compute the same")
        change = self.order.mode_between(earlier, later)
        if change is not None:
            return Verdict(f"%{change.name} changes a mode in between")
        return self.may_share(earlier, later)

    def may_share(self, earlier: fx.Node, later: fx.Node) -> Verdict:
        """Tell whether one of two nodes that compute the same may stand for both."""
        for operand in (*later.all_input_nodes, earlier):
            writer = self.order.written_between(operand, earlier, later)
            if writer is not None:
                return Verdict(f"%{writer.name} may write to %{operand.name} in between")
        if earlier.op == "get_attr":
            return Verdict()
        aliases = self.order.aliases
        if aliases.may_alias(earlier, later):
            is_apart = is_seen_apart(later, earlier, self._set)
            return Verdict("the caller gets a tensor each of both" if is_apart else None)
        for node in (earlier, later):
            if aliases.is_written(node):
                return Verdict(f"%{aliases.writers(node)[0].name} writes to one of them")
        if self._is_shared(earlier) and self._is_shared(later):
            return Verdict("both leave the graph, and the caller could see that they are one")
        return Verdict()

    def is_dead_after(self, value: fx.Node, node: fx.Node) -> Verdict:
        """Tell whether nobody reads a value's memory once a node has run.

        That is when the memory may be used again. The caller reads inputs, parameters and results.
        """
        if self._is_shared(value):
            return Verdict(f"the caller may see the memory of %{value.name}")
        if self._places[node] < self._places[value]:
            return Verdict(f"%{value.name} is not there yet")
        last = self._last_use(value)
        if last is not None and self._places[node] < self._places[last]:
            return Verdict(f"%{last.name} reads it later")
        return Verdict()

    def _last_use(self, value: fx.Node) -> fx.Node | None:
        """Return the last node that takes anything that shares a value's memory."""
        root = self.order.aliases.root
        if self._last_uses is None:
            self._last_uses = {}
            for node, place in self._places.items():
                for operand in input_nodes_of(node):
                    self._last_uses[root(operand)] = place
            self._by_place = list(self._places)
        place = self._last_uses.get(root(value))
        return None if place is None else self._by_place[place]

    def _is_shared(self, node: fx.Node) -> bool:
        return self.order.aliases.root(node) in self._shared


def is_seen_apart(node: fx.Node, other: fx.Node, known: dict[fx.Node, bool] | None = None) -> bool:
    """Tell whether anybody would notice that two tensors are one, if `other` stood for a node.

    They may share their memory: a name, a flag or a shape that is set of one is not the other's.
    The program may set it, or the caller who gets both.

    Args:
        node: The one to go.
        other: The one to stay.
        known: Of nodes that were asked for whether a user sets something; kept up to date. It stays
            true of `other` when it takes over the users of a node that nobody would miss.
    """
    call = resolve(node)
    gives_itself = call is not None and call.name in GIVES_ITSELF
    if gives_itself and any(one is not node for one in memory_below(node).surely):
        return False
    known = {} if known is None else known
    if _is_set(node, known) or _is_set(other, known):
        return True
    if not any(user.op == "output" for user in node.users):
        return False
    is_outside = other.op in ("placeholder", "get_attr")
    return is_outside or any(user.op == "output" for user in other.users)


def _is_set(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    if node not in known:
        known[node] = any(map(_may_set, node.users))
    return known[node]


# Calls that set something of a tensor that other tensors with its memory do not have.
_SETTING = frozenset(
    """
    aten.requires_grad_ aten.detach_ aten.retain_grad aten.t_ aten.transpose_ aten.swapaxes_
    aten.swapdims_ aten.squeeze_ aten.unsqueeze_ aten.resize_ aten.resize_as_ aten.set_
    aten.as_strided_ aten.rename_ python.setattr
    """.split()
)


def _may_set(user: fx.Node) -> bool:
    """Tell whether a call may set something of an operand beside its numbers."""
    call = resolve(user)
    return call is not None and (call.name in _SETTING or effects_of(user).is_opaque)


_PINNED = {"placeholder": "an input", "output": "the result"}


def merging_key(node: fx.Node) -> Hashable | None:
    """Return what nodes that compute the same have in common; None when one may not be merged."""
    if node.op == "get_attr":
        return ("get_attr", node.target)
    call = resolve(node)
    if call is None or not effects_of(node).is_pure:
        return None
    try:
        key = (call.name, call.operator.overload, _frozen(dict(call.arguments)))
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Hashable:
    """Return a hashable form in which equal arguments are equal, and `1`, `1.0`, `True` are not."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, dict):
        return tuple((key, _frozen(v)) for key, v in value.items())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(v) for v in value))
    if isinstance(value, slice):
        return ("slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    return (type(value).__name__, number_key(value))
