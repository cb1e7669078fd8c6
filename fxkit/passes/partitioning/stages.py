"""Sort nodes into stages, so that what runs in one place is together and can run in one go.

The stage of a node is never before that of a node it depends on, by value or by effect. So the
nodes of a stage are convex: no path leaves the stage and comes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from torch import fx

Edges = Mapping[fx.Node, Sequence[fx.Node]]


def two_kinds_of_stages(
    nodes: Sequence[fx.Node], effects: Edges, is_inside: Callable[[fx.Node], bool]
) -> list[list[fx.Node]]:
    """Sort nodes into as few stages as there can be, where nodes inside and outside take turns.

    The number of stages is the largest number of changes between inside and outside on any path,
    which is the least that any partition into convex parts needs. What is computed from parameters
    alone goes where it is wanted first.

    Args:
        nodes: Nodes in graph order.
        effects: What `effect_predecessors` returns for their graph.
        is_inside: Which nodes are inside.

    Returns:
        The stages of the nodes inside, each in graph order; empty ones are left out. Cost: linear
        in the edges.
    """
    stage: dict[fx.Node, int] = {}
    for node in nodes:
        least = max((stage[p] for p in _before(node, effects) if p in stage), default=0)
        stage[node] = least + (least % 2 != is_inside(node))
    _sink(nodes, effects, stage)
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if stage[node] % 2:
            found.setdefault(stage[node], []).append(node)
    return [found[number] for number in sorted(found)]


def _sink(nodes: Sequence[fx.Node], effects: Edges, stage: dict[fx.Node, int]) -> None:
    """Move what is computed from parameters alone to the first stage that wants it."""
    constant: set[fx.Node] = set()
    for node in nodes:
        if all(o.op == "get_attr" or o in constant for o in _before(node, effects)):
            constant.add(node)
    latest: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        bound = latest.get(node)
        if bound is not None and node in constant and stage[node] % 2:
            stage[node] = bound if bound % 2 else bound - 1
        for earlier in _before(node, effects):
            latest[earlier] = min(latest.get(earlier, stage[node]), stage[node])


def connected_pieces(nodes: Sequence[fx.Node], effects: Edges) -> list[list[fx.Node]]:
    """Split nodes of one stage into pieces that no value and no effect joins.

    Args:
        nodes: Nodes in graph order.
        effects: What `effect_predecessors` returns for their graph.

    Returns:
        The pieces, each in graph order. Cost: nearly linear in the edges.
    """
    parent = {node: node for node in nodes}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in nodes:
        for earlier in _before(node, effects):
            if earlier in parent:
                parent[root(node)] = root(earlier)
    pieces: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        pieces.setdefault(root(node), []).append(node)
    return list(pieces.values())


def labelled_stages(
    nodes: Sequence[fx.Node], effects: Edges, labels: Mapping[fx.Node, Hashable]
) -> list[tuple[Hashable, list[fx.Node]]]:
    """Sort nodes into stages of one label each.

    Each label gets one stage when its nodes can run in one go; where labels depend on one another
    in turns, they get several.

    Args:
        nodes: Nodes in graph order.
        effects: What `effect_predecessors` returns for their graph.
        labels: Node → its label; a node without one goes where its operands come from.

    Returns:
        `(label, nodes in graph order)`, in an order in which the stages can run. Cost: linear in
        the edges.
    """
    labels = _filled(nodes, effects, labels)
    order = _label_order(nodes, effects, labels)
    rank = {label: index for index, label in enumerate(order)}
    stage: dict[fx.Node, int] = {}
    for node in nodes:
        least = max((stage[p] for p in _before(node, effects) if p in stage), default=0)
        wanted = rank[labels[node]] if node in labels else least % len(order)
        stage[node] = least + (wanted - least) % len(order)
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(stage[node], []).append(node)
    return [(order[number % len(order)], found[number]) for number in sorted(found)]


def _filled(
    nodes: Sequence[fx.Node], effects: Edges, labels: Mapping[fx.Node, Hashable]
) -> dict[fx.Node, Hashable]:
    """Give nodes without a label that of the first node they depend on that has one."""
    filled = dict(labels)
    for node in nodes:
        if node not in filled:
            before = (filled[p] for p in _before(node, effects) if p in filled)
            filled.update((node, label) for label in itertools.islice(before, 1))
    return filled


def _label_order(
    nodes: Sequence[fx.Node], effects: Edges, labels: Mapping[fx.Node, Hashable]
) -> list[Hashable]:
    """Order labels so that, when none waits for itself, each comes after those it depends on."""
    needed: dict[Hashable, dict[Hashable, None]] = {}
    for node in nodes:
        if node not in labels:
            continue
        mine = needed.setdefault(labels[node], {})
        for earlier in _before(node, effects):
            if earlier in labels and labels[earlier] != labels[node]:
                mine[labels[earlier]] = None
    order: dict[Hashable, None] = {}
    for label in needed:
        _emit(label, needed, order)
    return list(order) or [None]


def _emit(
    label: Hashable,
    needed: Mapping[Hashable, Iterable[Hashable]],
    order: dict[Hashable, None],
) -> None:
    stack, opened = [label], set()
    while stack:
        top = stack[-1]
        if top in opened or top in order:
            order[stack.pop()] = None
            continue
        opened.add(top)
        stack.extend(n for n in reversed(list(needed[top])) if n not in order and n not in opened)


def _before(node: fx.Node, effects: Edges) -> Iterable[fx.Node]:
    return (*node.all_input_nodes, *effects.get(node, ()))
