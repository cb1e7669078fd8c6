"""Order between nodes: by value, and by effect."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterable

from torch import fx

from fxkit.analysis.effects import AliasSets, Effects, effects_of
from fxkit.ir.op import Attribute
from fxkit.torch_adapters.fx_nodes import order_key


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return all nodes that the given ones are computed from. Cost: linear in the cone."""
    return _reach(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return all nodes computed from the given ones. Cost: linear in the cone."""
    return _reach(nodes, lambda node: list(node.users))


class EffectOrder:
    """Which nodes may not change places, because of what they do besides computing.

    Two nodes are ordered when both have a global effect (random numbers, modes, unknown calls), or
    when one writes to memory that the other reads or writes.

    Args:
        graph: The graph. Cost: linear in its edges; each query is linear in the operands.

    Attributes:
        aliases: Which nodes may share memory.
        mode_changes: The nodes that change a mode (grad, autocast), in graph order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.aliases = AliasSets(graph)
        self.mode_changes = [n for n in self.aliases.effectful if effects_of(n).is_global]

    def may_swap(self, a: fx.Node, b: fx.Node) -> bool:
        """Tell whether two nodes, neither computed from the other, may change places."""
        effects_a, effects_b = effects_of(a), effects_of(b)
        if _is_global(effects_a) and _is_global(effects_b):
            return False
        if effects_a.is_opaque or effects_b.is_opaque:
            return False
        if effects_a.is_global or effects_b.is_global:
            return False
        if effects_a.may_raise or effects_b.may_raise:
            return effects_a.is_pure or effects_b.is_pure
        return not (self._touches(a, b) or self._touches(b, a))

    def written_between(
        self,
        value: fx.Node | Attribute,
        first: fx.Node,
        last: fx.Node,
        but: Container[fx.Node] = (),
    ) -> fx.Node | None:
        """Return a node strictly between two others that may write to some memory, or None.

        Args:
            value: The node, or the module's parameter or buffer, whose memory is meant.
            first: The earlier of the two nodes.
            last: The later of the two nodes.
            but: Nodes that don't count.
        """
        if not self.aliases.effectful:
            return None
        return _first_between(self.aliases.writers(value), first, last, but)

    def mode_between(self, first: fx.Node, last: fx.Node) -> fx.Node | None:
        """Return a node strictly between two others that changes a mode (grad, autocast)."""
        return _first_between(self.mode_changes, first, last)

    def _touches(self, writer: fx.Node, other: fx.Node) -> bool:
        """Tell whether `writer` writes to memory that `other` reads, writes or returns."""
        for written in effects_of(writer).writes:
            if not isinstance(written, fx.Node):
                return True
            if any(self.aliases.may_alias(written, n) for n in (*other.all_input_nodes, other)):
                return True
        return False


def _first_between(
    ordered: list[fx.Node], first: fx.Node, last: fx.Node, but: Container[fx.Node] = ()
) -> fx.Node | None:
    """Return the first of some nodes in graph order that is strictly between two others."""
    start = bisect.bisect_right(ordered, order_key(first), key=order_key)
    for index in range(start, len(ordered)):
        if not ordered[index] < last:
            return None
        if ordered[index] not in but:
            return ordered[index]
    return None


def _is_global(effects: Effects) -> bool:
    return effects.is_random or effects.is_opaque or effects.is_global


def _reach(
    nodes: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [n for node in nodes for n in neighbours(node)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(neighbours(node))
    return seen
