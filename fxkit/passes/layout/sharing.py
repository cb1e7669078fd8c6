"""Whether anybody could tell that two tensors became one."""

from __future__ import annotations

from torch import fx

from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import effects_of
from fxkit.analysis.moves import is_seen_apart


class MemorySharing:
    """Memory that nodes share, and that the caller sees, kept up while a graph is edited.

    Args:
        graph: The graph. Cost: linear once.

    Attributes:
        order: Effects and aliases of the graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order = EffectOrder(graph)
        output = next(iter(reversed(graph.nodes)))
        outside = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
        root = self.order.aliases.root
        self._seen = {root(n) for n in (*outside, *output.all_input_nodes)}

    def refusal(self, node: fx.Node, other: fx.Node) -> str | None:
        """Say why a node may not share memory with another one that comes before it.

        Returns:
            None when they may, or do so already.
        """
        aliases = self.order.aliases
        if aliases.may_alias(node, other):
            is_apart = is_seen_apart(node, other)
            return f"the caller gets a tensor each of it and %{other.name}" if is_apart else None
        for one in (node, other):
            last = next(reversed(aliases.writers(one)), None)
            if last is not None and node < last:
                return f"%{last.name} writes to one of two tensors that would be one"
        if aliases.root(node) in self._seen and aliases.root(other) in self._seen:
            return "the caller could see that two tensors became one"
        return None

    def is_written(self, node: fx.Node) -> bool:
        """Tell whether any node may write to a node's memory."""
        return self.order.aliases.is_written(node)

    def add(self, node: fx.Node) -> fx.Node:
        """Take note of a node that was made; return it."""
        self.order.aliases.add(node)
        root = self.order.aliases.root
        self._mark(node, any(root(o) in self._seen for o in effects_of(node).aliases))
        return node

    def join(self, node: fx.Node, other: fx.Node) -> None:
        """Take note that two nodes share memory from now on, or that one stands for the other."""
        root = self.order.aliases.root
        is_seen = root(node) in self._seen or root(other) in self._seen
        self.order.aliases.join(node, other)
        self._mark(node, is_seen)

    def _mark(self, node: fx.Node, is_seen: bool) -> None:
        if is_seen:
            self._seen.add(self.order.aliases.root(node))
