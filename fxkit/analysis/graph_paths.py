"""Paths through a graph: how long, through which nodes, and where they all go through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from fxkit.analysis.dependencies import ancestors, descendants
from fxkit.analysis.operator_names import shown_operator
from fxkit.errors import FxkitError
from fxkit.ir.types import type_of


def paths(start: fx.Node, end: fx.Node, limit: int) -> list[list[fx.Node]]:
    """Return the paths from one node to another, ends included, at most `limit` of them.

    Cost: linear in the graph, and in the lengths of the paths returned.
    """
    inside = {start, end, *(descendants([start]) & ancestors([end]))}
    found: list[list[fx.Node]] = []
    path = [start]
    ahead = [iter(start.users)]  # what is still to be followed from each node of the path
    while path and len(found) < limit:
        if path[-1] is end:
            found.append(list(path))
        user = None if path[-1] is end else next((u for u in ahead[-1] if u in inside), None)
        if user is None:
            path.pop()
            ahead.pop()
            continue
        path.append(user)
        ahead.append(iter(user.users))
    return found


def is_convex(nodes: Iterable[fx.Node]) -> bool:
    """Tell whether no path leaves the given nodes and enters them again.

    Cost: linear in the graph.
    """
    inside = set(nodes)
    outside_after = descendants(inside) - inside
    return not any(o in outside_after for n in inside for o in n.all_input_nodes)


def distance(start: fx.Node, end: fx.Node) -> int | None:
    """Return the edges on the shortest path between two nodes, or None where there is none.

    Cost: linear in the graph.
    """
    steps, frontier, seen = 0, [start], {start}
    while frontier:
        if end in frontier:
            return steps
        reached = {user for node in frontier for user in node.users} - seen
        seen |= reached
        frontier, steps = list(reached), steps + 1
    return None


def smallest_cut(
    graph: fx.Graph, sources: Sequence[fx.Node], targets: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return a smallest set of nodes that every path from `sources` to `targets` goes through.

    Raises:
        FxkitError: When there are no sources or no targets.

    Cost: a maximum flow (networkx), in practice near linear times the size of the cut.
    """
    import networkx

    if not sources or not targets:
        raise FxkitError(
            f"expected nodes to cut between, got no {'targets' if sources else 'sources'}",
            hint="give at least one node on either side",
        )
    flow = networkx.DiGraph()
    for node in graph.nodes:
        flow.add_edge((node.name, "in"), (node.name, "out"), capacity=1)
        for producer in node.all_input_nodes:
            flow.add_edge((producer.name, "out"), (node.name, "in"))
    for node in sources:
        flow.add_edge("source", (node.name, "in"))
    for node in targets:
        flow.add_edge((node.name, "out"), "target")
    _, (reached, _) = networkx.minimum_cut(flow, "source", "target")
    return [n for n in graph.nodes if (n.name, "in") in reached and (n.name, "out") not in reached]


def as_networkx(graph: fx.Graph) -> Any:
    """Return a `networkx.DiGraph` whose nodes are names, with `operator` and `type` on each."""
    import networkx

    result = networkx.DiGraph()
    for node in graph.nodes:
        result.add_node(node.name, operator=shown_operator(node), type=type_of(node))
    for node in graph.nodes:
        result.add_edges_from((producer.name, node.name) for producer in node.all_input_nodes)
    return result


def immediate_dominators(graph: fx.Graph, *, reverse: bool) -> dict[str, str]:
    """Return the name of the nearest node on every path to each node, for those that have one.

    Args:
        graph: The graph.
        reverse: Whether paths go from the output to the node; else from the inputs.

    Cost: nearly linear (networkx).
    """
    import networkx

    edges = as_networkx(graph)
    edges = edges.reverse() if reverse else edges
    root = "<root>"  # no name of a node
    sources = [name for name, degree in edges.in_degree() if degree == 0]
    edges.add_node(root)
    edges.add_edges_from((root, name) for name in sources)
    found = networkx.immediate_dominators(edges, root)
    pairs = ((name, dominator) for name, dominator in found.items() if name != root)
    return {name: dominator for name, dominator in pairs if dominator not in (None, root)}
