"""Results that must not share memory, though torch computes equal values once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from fxkit.analysis.effects import AliasSets


def memories_of(graph: fx.Graph, count: int) -> list[Hashable]:
    """Return for each of the first `count` results of a graph what stands for its memory."""
    sets = AliasSets(graph)
    return [sets.root(r) if isinstance(r, fx.Node) else None for r in _results(graph)[:count]]


def keep_apart(gm: fx.GraphModule, before: Sequence[Hashable]) -> None:
    """Copy results that share memory since equal values are computed once.

    Args:
        gm: The graph, in which they may. It is changed.
        before: What stood for the memory of each result when they did not.
    """
    now = memories_of(gm.graph, len(before))
    results = list(_results(gm.graph))
    first: dict[Hashable, Hashable] = {}
    output = next(iter(reversed(gm.graph.nodes)))
    for place, (memory, then) in enumerate(zip(now, before, strict=True)):
        if memory is None or first.setdefault(memory, then) == then:
            continue
        with gm.graph.inserting_before(output):
            copy = gm.graph.call_function(torch.ops.aten.clone.default, (results[place],))
        copy.meta = dict(results[place].meta)
        results[place] = copy
    if results != list(_results(gm.graph)):
        output.args = (tuple(results),)
        gm.recompile()


def _results(graph: fx.Graph) -> Sequence[Any]:
    values: Any = next(iter(reversed(graph.nodes))).args[0]
    return values
