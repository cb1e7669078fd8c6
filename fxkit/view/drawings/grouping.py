"""Group nodes by a key so that the groups form no cycle, and order them.

Linear in nodes and edges, but for the heap that breaks ties between groups that are ready together.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence

from torch import fx

Keys = Mapping[fx.Node, Hashable]
Users = Mapping[fx.Node, Sequence[fx.Node]]


def acyclic_groups(nodes: list[fx.Node], keys: Keys, users: Users) -> list[list[fx.Node]]:
    """Group nodes by key and order the groups; groups that lie on a cycle are split into runs."""
    runs = _runs(nodes, keys)
    if len(runs) == len(set(keys.values())):
        return runs
    members: dict[Hashable, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(keys[node], []).append(node)
    component = _components(members, keys, users)
    tangled = {key for key in members if component[key][1] > 1}
    position = {node: i for i, node in enumerate(nodes)}
    groups = [m for key, m in members.items() if key not in tangled]
    by_component: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if keys[node] in tangled:
            by_component.setdefault(component[keys[node]][0], []).append(node)
    for part in by_component.values():
        groups.extend(_runs(part, keys))
    return _topological(groups, position, users)


def _runs(nodes: list[fx.Node], keys: Keys) -> list[list[fx.Node]]:
    runs: list[list[fx.Node]] = []
    previous: Hashable = None
    for node in nodes:
        if runs and keys[node] == previous:
            runs[-1].append(node)
        else:
            runs.append([node])
        previous = keys[node]
    return runs


def _components(
    members: dict[Hashable, list[fx.Node]], keys: Keys, users: Users
) -> dict[Hashable, tuple[int, int]]:
    """Map each key to its strongly connected component and that component's size."""
    successors: dict[Hashable, list[Hashable]] = {}
    for key, nodes in members.items():
        targets: dict[Hashable, None] = {}
        for node in nodes:
            for user in users[node]:
                if user in keys and keys[user] != key:
                    targets[keys[user]] = None
        successors[key] = list(targets)
    return _tarjan(successors)


def _tarjan(successors: dict[Hashable, list[Hashable]]) -> dict[Hashable, tuple[int, int]]:
    order: dict[Hashable, int] = {}
    low: dict[Hashable, int] = {}
    result: dict[Hashable, tuple[int, int]] = {}
    stack: list[Hashable] = []
    found = 0
    for root in successors:
        if root in order:
            continue
        work = [(root, iter(successors[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        while work:
            key, targets = work[-1]
            target = next(targets, None)
            if target is not None:
                if target not in order:
                    order[target] = low[target] = len(order)
                    stack.append(target)
                    work.append((target, iter(successors[target])))
                elif target not in result:
                    low[key] = min(low[key], order[target])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[key])
            if low[key] == order[key]:
                part = [stack.pop()]
                while part[-1] != key:
                    part.append(stack.pop())
                result.update(dict.fromkeys(part, (found, len(part))))
                found += 1
    return result


def _topological(
    groups: list[list[fx.Node]], position: dict[fx.Node, int], users: Users
) -> list[list[fx.Node]]:
    """Order groups so that each comes after what it reads; ties go to the earlier first node."""
    owner = {node: i for i, group in enumerate(groups) for node in group}
    followers: list[set[int]] = [set() for _ in groups]
    waiting = [0] * len(groups)
    for i, group in enumerate(groups):
        for node in group:
            followers[i].update(owner[u] for u in users[node] if owner.get(u, i) != i)
    for targets in followers:
        for target in targets:
            waiting[target] += 1
    ready = [(position[group[0]], i) for i, group in enumerate(groups) if not waiting[i]]
    heapq.heapify(ready)
    ordered: list[list[fx.Node]] = []
    while ready:
        _, i = heapq.heappop(ready)
        ordered.append(groups[i])
        for target in followers[i]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (position[groups[target][0]], target))
    return ordered
