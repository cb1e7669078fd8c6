"""Groups for nodes that no module is recorded for.

Where the constants that nodes read have paths, as in `layers.0.norm.weight`, the paths tell the
modules. Else the longest stretches that repeat are the groups: `block 1`, `block 2`, ... What is
left of a very long list is cut into parts. Inputs of which there are very many, such as the weights
of an exported graph, belong to the module that reads them. All is linear in the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fxkit.ir.node_kinds import COMPUTES_NOTHING

Stack = tuple[tuple[str, str], ...]
Stacks = dict[Any, Stack]

FEW = 48
"""A graph of fewer calls without modules is shown as it is."""

MANY = 1500
"""A list of more nodes in no group is cut into parts."""

_MANY_INPUTS = 24
_PARTS = 150
_PATHS_WANTED = 8
_GRAM = 4
_CANDIDATES = 12


def infer_stacks(
    nodes: Sequence[Any],
    stacks: Stacks,
    users: Mapping[Any, Sequence[Any]],
    words: Callable[[Any], object],
    reads: Callable[[Any], str],
    kind: Callable[[str], str],
) -> Stacks:
    """Return the stacks with those that can be inferred.

    Args:
        nodes: In the order they run.
        stacks: The modules around each, as recorded, outermost first.
        users: The nodes that read each.
        words: What a node does, as something that is equal for nodes that do the same.
        reads: The path of a constant that a node reads; "" when there is none.
        kind: The class of the module with a path; "" when it isn't known.
    """
    calls = [node for node in nodes if _is_call(node)]
    bare = [node for node in calls if not stacks[node]]
    found = dict(stacks)
    if len(bare) >= FEW and 2 * len(bare) > len(calls):
        paths = {node: _module_of(reads(node)) for node in bare}
        if sum(bool(path) for path in paths.values()) >= _PATHS_WANTED:
            found.update(_by_path(calls, stacks, paths, kind))
        else:
            found.update(_by_repeats(bare, words))
    found.update(_parts([node for node in bare if not found[node]]))
    found.update(_inputs([node for node in nodes if not _is_call(node)], found, users))
    return found


def _is_call(node: Any) -> bool:
    subject = node if isinstance(node, fx.Node) else node.node
    return subject.op not in COMPUTES_NOTHING


def _module_of(path: str) -> str:
    return path.rpartition(".")[0]


def _by_path(
    calls: Sequence[Any],
    stacks: Stacks,
    paths: Mapping[Any, str],
    kind: Callable[[str], str],
) -> Stacks:
    """A node that reads no constant lies in what its neighbours that do have in common."""
    known = [stacks[node][-1][0] if stacks[node] else paths[node] for node in calls]
    following = [""] * len(known)
    for i in range(len(known) - 2, -1, -1):
        following[i] = known[i + 1] or following[i + 1]
    found: Stacks = {}
    before = ""
    kinds: dict[str, str] = {}
    for node, own, after in zip(calls, known, following, strict=True):
        before = own or before
        if not stacks[node]:
            found[node] = _as_stack(own or _common(before, after), kind, kinds)
    return found


def _common(before: str, after: str) -> str:
    """Return the module around two paths; between two layers of a list the first of them."""
    first, second = before.split("."), after.split(".")
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    for at in (same, same + 1):
        if at < len(first) and first[at].isdigit():
            return ".".join(first[: at + 1])
    return ".".join(first[:same])


def _as_stack(path: str, kind: Callable[[str], str], kinds: dict[str, str]) -> Stack:
    """Return the modules that a path names; a number belongs to the list before it."""
    parts = path.split(".") if path else []
    ends = [
        i + 1
        for i, part in enumerate(parts)
        if part.isdigit() or i + 1 == len(parts) or not parts[i + 1].isdigit()
    ]
    stack = [".".join(parts[:end]) for end in ends]
    for module in stack:
        if module not in kinds:
            kinds[module] = kind(module)
    return tuple((module, kinds[module]) for module in stack)


def _by_repeats(bare: Sequence[Any], words: Callable[[Any], object]) -> Stacks:
    """Group what repeats, the widest stretch first."""
    interned: dict[object, int] = {}
    tokens = [interned.setdefault(words(node), len(interned)) for node in bare]
    taken = [False] * len(tokens)
    starts: list[tuple[int, int]] = []
    for period in _periods(tokens):
        for start, end in _runs(tokens, period):
            pieces = _free(taken, start, end, period)
            starts.extend((at, period) for at in pieces)
            for at in pieces:
                taken[at : at + period] = [True] * period
    found: Stacks = {}
    for number, (at, period) in enumerate(sorted(starts), start=1):
        stack = ((f"block {number}", ""),)
        found.update(dict.fromkeys(bare[at : at + period], stack))
    return found


def _periods(tokens: Sequence[int]) -> list[int]:
    """Return the distances at which most short stretches come again, shorter ones first."""
    last: dict[tuple[int, ...], int] = {}
    distances: Counter[int] = Counter()
    for at in range(len(tokens) - _GRAM + 1):
        gram = tuple(tokens[at : at + _GRAM])
        if gram in last:
            distances[at - last[gram]] += 1
        last[gram] = at
    likely = [d for d, _ in distances.most_common(_CANDIDATES) if d >= _GRAM]
    covered = {d: sum(end - start for start, end in _runs(tokens, d)) for d in likely}
    return sorted((d for d in likely if covered[d]), key=lambda d: (-covered[d], d))


def _runs(tokens: Sequence[int], period: int) -> list[tuple[int, int]]:
    """Return the stretches of at least two periods in which each token comes again."""
    runs = []
    start = 0
    for at in range(period, len(tokens) + 1):
        if at < len(tokens) and tokens[at] == tokens[at - period]:
            continue
        if at - start >= 2 * period and len(set(tokens[start : start + period])) > 1:
            runs.append((start, at))
        start = at - period + 1
    return runs


def _free(taken: Sequence[bool], start: int, end: int, period: int) -> list[int]:
    """Return where whole periods of a stretch begin that nothing has taken; two at least."""
    pieces = []
    at = start
    while at + period <= end:
        if any(taken[at : at + period]):
            at += 1
            continue
        pieces.append(at)
        at += period
    return pieces if len(pieces) > 1 else []


def _parts(left: Sequence[Any]) -> Stacks:
    """Cut a list that is too long to be looked at."""
    if len(left) <= MANY:
        return {}
    size = max(100, -(-len(left) // _PARTS))
    return {node: ((f"part {i // size + 1}", ""),) for i, node in enumerate(left)}


def _inputs(given: Sequence[Any], stacks: Stacks, users: Mapping[Any, Sequence[Any]]) -> Stacks:
    """Put each of many inputs into the module in which all of its users are."""
    inputs = [node for node in given if users[node]]
    if len(inputs) <= _MANY_INPUTS:
        return {}
    found: Stacks = {}
    for node in inputs:
        around = stacks[users[node][0]]
        for user in users[node][1:]:
            around = _shared(around, stacks[user])
        found[node] = around
    return found


def _shared(first: Stack, second: Stack) -> Stack:
    same = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        same += 1
    return first[:same]
