"""Where in a graph a new node goes."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxkit.ir import edit_errors


def insertion_point(
    graph: fx.Graph, before: fx.Node | None, after: fx.Node | None, operands: Any
) -> fx.Node:
    """Return the node to insert before.

    Args:
        graph: The graph.
        before: The node that is asked for.
        after: The node to insert after; without either, a new node goes as early as it can.
        operands: The operands of the new node.

    Raises:
        RewriteError: When that is after the output.
    """
    if before is not None:
        return before
    if after is not None:
        return _following(after)
    used: list[fx.Node] = []
    map_arg(operands, used.append)
    return _following(max(used)) if used else first_body_node(graph)


def first_body_node(graph: fx.Graph) -> fx.Node:
    """Return the first node that is neither an input nor an attribute."""
    return next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))


def _following(node: fx.Node) -> fx.Node:
    """Return the node before which to insert what comes after `node`: never among the inputs."""
    if node.op == "output":
        raise edit_errors.behind_output(node)
    place = node.next
    while place.op == "placeholder":
        place = place.next
    return place
