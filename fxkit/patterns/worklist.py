"""The worklist of a rewrite: which nodes are still to be visited, in which order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from torch import fx

from fxkit.torch_adapters.fx_nodes import order_key

Level = TypeVar("Level")


class Worklist(Generic[Level]):
    """Nodes to visit, each once for each benefit that rules of its operator have.

    The largest benefit comes first, in the whole graph; of one benefit, the earlier node.

    Args:
        visits: The nodes to visit at first, as `(node, benefit, level)`.
    """

    def __init__(self, visits: Iterable[tuple[fx.Node, int, Level]]) -> None:
        self._known: list[Any] = sorted(
            ((-benefit, order_key(node), id(node), node, level) for node, benefit, level in visits),
            reverse=True,
        )
        self._added: list[Any] = []
        self._waiting = {(entry[3], entry[0]) for entry in self._known}

    def __len__(self) -> int:
        return len(self._known) + len(self._added)

    def push(self, node: fx.Node, benefit: int, level: Level) -> None:
        """Add a visit, unless it waits already."""
        key = node, -benefit
        if key not in self._waiting:
            self._waiting.add(key)
            heapq.heappush(self._added, (-benefit, order_key(node), id(node), node, level))

    def pop(self) -> tuple[fx.Node, Level]:
        """Take the next visit out."""
        known, added = self._known, self._added
        if known and (not added or known[-1] < added[0]):
            entry = known.pop()
        else:
            entry = heapq.heappop(added)
        self._waiting.discard((entry[3], entry[0]))
        return entry[3], entry[4]
