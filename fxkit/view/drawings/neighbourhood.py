"""Parts of a graph that are worth a look: around a node, between two, before and behind one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.view.drawings.hierarchy import Hierarchy

_Edges = Mapping[fx.Node, Sequence[fx.Node]]


def node_named(hierarchy: Hierarchy, node: fx.Node | str) -> fx.Node:
    """Return the node of this name, or the node itself.

    Raises:
        UnsupportedError: The graph shows no such node.
    """
    names = {shown.name: shown for shown in hierarchy.nodes}
    name = node if isinstance(node, str) else node.name
    found = names.get(name)
    if found is not None and (isinstance(node, str) or found is node):
        return found
    close = difflib.get_close_matches(name, names, n=3)
    raise UnsupportedError(
        f"expected a node of the drawing, got {name!r}",
        hint=f"did you mean {', '.join(close)}?" if close else "constants are part of their users",
    )


def around(hierarchy: Hierarchy, node: fx.Node | str, radius: int) -> set[fx.Node]:
    """Return the nodes within `radius` steps, along and against the flow of values."""
    if radius < 0:
        raise UnsupportedError(f"expected a radius of 0 or more, got {radius}")
    found = {node_named(hierarchy, node)}
    edge = list(found)
    for _ in range(radius):
        near = (n for at in edge for n in (*hierarchy.operands[at], *hierarchy.users[at]))
        edge = [n for n in dict.fromkeys(near) if n not in found]
        found.update(edge)
    return found


def between(hierarchy: Hierarchy, first: fx.Node | str, last: fx.Node | str) -> set[fx.Node]:
    """Return the nodes on the ways from one node to another; none when there is no way."""
    return used_from(hierarchy, first) & needed_by(hierarchy, last)


def needed_by(hierarchy: Hierarchy, node: fx.Node | str) -> set[fx.Node]:
    """Return a node and all that its value depends on."""
    return _reach([node_named(hierarchy, node)], hierarchy.operands)


def used_from(hierarchy: Hierarchy, node: fx.Node | str) -> set[fx.Node]:
    """Return a node and all that depends on its value."""
    return _reach([node_named(hierarchy, node)], hierarchy.users)


def _reach(start: Iterable[fx.Node], edges: _Edges) -> set[fx.Node]:
    found = set(start)
    waiting = list(found)
    while waiting:
        for other in edges[waiting.pop()]:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found
