"""How long each value is needed."""

from __future__ import annotations

from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.types import TensorType, type_of


class Liveness:
    """The last use of every node, and what is alive after each.

    Args:
        graph: The graph. Cost: linear in its edges.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._order = list(graph.nodes)
        self._last_use: dict[fx.Node, fx.Node] = {}
        self._dying: dict[fx.Node, list[fx.Node]] = {}
        for node in self._order:
            for operand in node.all_input_nodes:
                self._last_use[operand] = node
        for node in self._order:
            self._dying.setdefault(self.last_use(node), []).append(node)

    def last_use(self, node: fx.Node) -> fx.Node:
        """Return the last node that uses `node`; itself when nobody does."""
        return self._last_use.get(node, node)

    def dying_at(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that nobody needs after `node` has run."""
        return self._dying.get(node, [])

    def live_after(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes alive after `node` has run. Cost: linear in the graph."""
        alive: dict[fx.Node, None] = {}
        for current in self._order:
            alive[current] = None
            for dead in self.dying_at(current):
                alive.pop(dead, None)
            if current is node:
                break
        return list(alive)

    def peak_bytes(self) -> tuple[int, fx.Node | None]:
        """Return the largest sum of bytes that computed tensors hold at once, and where.

        Views, parameters and inputs are not counted as storage of their own when their type tells
        that they are; a value that aliases another is counted once at most per node.
        """
        alive = peak = 0
        where: fx.Node | None = None
        for node in self._order:
            alive += _bytes(node)
            if alive > peak:
                peak, where = alive, node
            alive -= sum(_bytes(dead) for dead in self.dying_at(node))
        return peak, where


def _bytes(node: fx.Node) -> int:
    if node.op in COMPUTES_NOTHING or effects_of(node).aliases:
        return 0
    known = type_of(node)
    values = known if isinstance(known, (tuple, list)) else (known,)
    return sum(v.nbytes for v in values if isinstance(v, TensorType))
