"""Several states of one graph laid over each other: each node once, with the time it lived.

Everything keeps its place from state to state, so that the eye sees what comes and goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from fxkit.view.drawings.hierarchy import Hierarchy, constant_sizes, is_shown, stack_of
from fxkit.view.texts.labels import label_of


class Difference(Protocol):
    """What is different between a state and the next: a `GraphDiff`."""

    @property
    def matched(self) -> Mapping[str, str]:
        """Name before → name after, for the nodes that are in both."""
        ...

    @property
    def modules(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The two graphs."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """Number of nodes of each kind of change."""
        ...

    def of_kind(self, kind: str) -> Sequence[Any]:
        """Return the changes of a kind."""
        ...


class Vertex:
    """A node through the states that it is in.

    Attributes:
        node: The node of the last state that has it.
        born: The first state that has it.
        died: The first state after `born` that has it no more; None when it is there to the end.
    """

    __slots__ = ("born", "died", "node")

    def __init__(self, node: fx.Node, born: int) -> None:
        self.node = node
        self.born = born
        self.died: int | None = None


class Union(Hierarchy):
    """The tree of groups of all states of a graph.

    Args:
        states: The graph modules, the first one first.
        diffs: The difference between each and the next.

    Attributes:
        vertices: For each state its nodes by name.
    """

    def __init__(self, states: Sequence[fx.GraphModule], diffs: Sequence[Difference]) -> None:
        self.graph_module = states[-1]
        self.fold = True
        self.vertices = _vertices(states, diffs)
        nodes: list[Any] = _ordered(self.vertices)
        self.nodes = nodes
        self.size = len(self.graph_module.graph.nodes)
        self._lives = _edge_lives(states, self.vertices)
        self._join()
        self.labels = {vertex: label_of(vertex.node) for vertex in nodes}
        sizes: dict[fx.Node, dict[int, int]] = {}
        for gm in states:
            sizes.update(constant_sizes(gm))
        own: dict[Any, dict[int, int]] = {v: sizes.get(v.node, {}) for v in nodes}
        stacks = {vertex: stack_of(vertex.node) for vertex in nodes}
        self._build(self._inferred(stacks), own)

    def subject(self, node: Any) -> fx.Node:
        """Return the last node that a vertex was."""
        return node.node

    def _more(self, node: Any) -> object:
        return node.born, node.died

    def _join(self) -> None:
        """Set operands and users from the edges; those that run against the order are left out."""
        position = {vertex: i for i, vertex in enumerate(self.nodes)}
        self.operands = {vertex: [] for vertex in self.nodes}
        self.users = {vertex: [] for vertex in self.nodes}
        for source, target in self._lives:
            if position[source] < position[target]:
                self.operands[target].append(source)
                self.users[source].append(target)

    def lives(self) -> dict[int, list[list[list[int | None]]]]:
        """Return when each edge is there, for nodes with an edge that comes or goes by itself."""
        result = {}
        for i, vertex in enumerate(self.nodes):
            spans = [self._lives[operand, vertex] for operand in self.operands[vertex]]
            own = [_both(operand, vertex) for operand in self.operands[vertex]]
            if spans != own:
                result[i] = spans
        return result


def _both(a: Any, b: Any) -> list[list[int | None]]:
    """Return when two vertices are both there."""
    born = max(a.born, b.born)
    ends = [died for died in (a.died, b.died) if died is not None]
    return [[born, min(ends, default=None)]]


def _vertices(
    states: Sequence[fx.GraphModule], diffs: Sequence[Difference]
) -> list[dict[str, Vertex]]:
    found: list[dict[str, Vertex]] = []
    for step, gm in enumerate(states):
        known: dict[str, Vertex] = {}
        if step:
            back = {after: before for before, after in diffs[step - 1].matched.items()}
            earlier = found[-1]
            known = {after: earlier[b] for after, b in back.items() if b in earlier}
        now: dict[str, Vertex] = {}
        for node in gm.graph.nodes:
            if not is_shown(node):
                continue
            vertex = known.get(node.name) or Vertex(node, step)
            vertex.node = node
            now[node.name] = vertex
        alive = set(now.values())
        for vertex in found[-1].values() if found else ():
            if vertex.died is None and vertex not in alive:
                vertex.died = step
        found.append(now)
    return found


def _ordered(vertices: Sequence[Mapping[str, Vertex]]) -> list[Vertex]:
    """Put each vertex behind the one that it followed where it was born."""
    following: dict[Vertex | None, list[Vertex]] = {}
    seen: set[Vertex] = set()
    for now in vertices:
        previous: Vertex | None = None
        for vertex in now.values():
            if vertex not in seen:
                seen.add(vertex)
                following.setdefault(previous, []).append(vertex)
            previous = vertex
    ordered: list[Vertex] = []
    waiting = list(reversed(following.get(None, ())))
    while waiting:
        vertex = waiting.pop()
        ordered.append(vertex)
        waiting.extend(following.get(vertex, ()))
    return ordered


def _edge_lives(
    states: Sequence[fx.GraphModule], vertices: Sequence[Mapping[str, Vertex]]
) -> dict[tuple[Any, Any], list[list[int | None]]]:
    """Map each edge to the spans of states in which it is there."""
    lives: dict[tuple[Any, Any], list[list[int | None]]] = {}
    for step, (gm, now) in enumerate(zip(states, vertices, strict=True)):
        for node in gm.graph.nodes:
            target = now.get(node.name)
            if target is None:
                continue
            for operand in node.all_input_nodes:
                source = now.get(operand.name)
                if source is None:
                    continue
                spans = lives.setdefault((source, target), [])
                if spans and spans[-1][1] == step:
                    spans[-1][1] = step + 1
                else:
                    spans.append([step, step + 1])
    last = len(states)
    for spans in lives.values():
        if spans[-1][1] == last:
            spans[-1][1] = None
    return lives
