"""Order between nodes that no operand shows: what has to run before what because of effects."""

from __future__ import annotations

from torch import fx

from fxkit.analysis.effects import AliasSets, Effects, effects_of
from fxkit.ir.node_kinds import COMPUTES_NOTHING


def effect_predecessors(
    graph: fx.Graph, aliases: AliasSets | None = None
) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node, nodes that must stay before it although it takes nothing from them.

    Any order of the nodes that respects these edges and the operands does the same: writes stay
    between the reads around them, random numbers are drawn in the same order, and nothing passes a
    node of which nothing is known or that changes a mode.

    Args:
        graph: The graph.
        aliases: Its alias sets, if they were made before.

    Returns:
        Node → earlier nodes, at least one edge on a path for each pair that may not change places;
        nodes without such edges are left out. Cost: linear in the edges of the graph.
    """
    order = _Order(aliases or AliasSets(graph))
    for node in graph.nodes:
        if node.op not in COMPUTES_NOTHING:
            order.visit(node)
    return order.found


class _Order:
    def __init__(self, aliases: AliasSets) -> None:
        self.found: dict[fx.Node, list[fx.Node]] = {}
        self._aliases = aliases
        self._barrier: fx.Node | None = None
        self._forget(())

    def visit(self, node: fx.Node) -> None:
        """Add the edges into the next node of the graph."""
        effects = effects_of(node)
        before = [] if self._barrier is None else [self._barrier]
        if _is_barrier(effects):
            before.extend(self._since)
            self._barrier = node
            self._forget(())
        else:
            before.extend(self._chains(node, effects))
            before.extend(self._memory(node, effects))
            self._since.append(node)
        if before:
            self.found[node] = list(dict.fromkeys(before))

    def _forget(self, since: tuple[fx.Node, ...]) -> None:
        """Begin anew behind a node that nothing passes."""
        self._since = list(since)
        self._random: fx.Node | None = None
        self._raising: fx.Node | None = None
        self._impure: list[fx.Node] = []
        self._writer: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}

    def _chains(self, node: fx.Node, effects: Effects) -> list[fx.Node]:
        """Return what comes before a node that draws random numbers, or that may raise."""
        before = []
        if effects.is_random:
            before.extend([] if self._random is None else [self._random])
            self._random = node
        if effects.is_pure:
            return before
        if self._raising is not None:
            before.append(self._raising)
        if effects.may_raise:
            before.extend(self._impure)
            self._raising, self._impure = node, []
        else:
            self._impure.append(node)
        return before

    def _memory(self, node: fx.Node, effects: Effects) -> list[fx.Node]:
        """Return who wrote to what a node touches, and who read what it writes to."""
        if not self._aliases.effectful:
            return []
        root = self._aliases.root
        written = {root(w) for w in effects.writes if isinstance(w, fx.Node)}
        before = []
        for memory in {root(n) for n in (*node.all_input_nodes, node)}:
            if memory in self._writer:
                before.append(self._writer[memory])
            if memory in written:
                before.extend(self._readers.pop(memory, ()))
                self._writer[memory] = node
            else:
                self._readers.setdefault(memory, []).append(node)
        return before


def _is_barrier(effects: Effects) -> bool:
    """Tell whether nothing may pass a node; one that writes to a module's own state is such."""
    writes_state = any(not isinstance(w, fx.Node) for w in effects.writes)
    return effects.is_opaque or effects.is_global or writes_state
