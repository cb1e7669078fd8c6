"""The graphs that are kept of a captured program, the last used one first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fxkit.tracing.recording.guarded_graph import GuardedGraph

MAX_GRAPHS = 8


class GraphCache:
    """The graphs of a program, at most `MAX_GRAPHS`.

    Attributes:
        entries: What is kept of each graph, the last used one first; exchanged as a whole.
        evictions: How many graphs were given up for others.
    """

    def __init__(self) -> None:
        self.entries: tuple[GuardedGraph, ...] = ()
        self.evictions = 0
        self._lock = threading.Lock()

    def add(self, entry: GuardedGraph) -> bool:
        """Put a graph first; tell whether the last one was given up for it."""
        with self._lock:
            entries = (entry, *self.entries)
            self.entries = entries[:MAX_GRAPHS]
            is_full = len(entries) > MAX_GRAPHS
            self.evictions += is_full
        return is_full

    def use(self, entry: GuardedGraph) -> None:
        """Put a graph first that has just run, if it is still kept."""
        if self.entries[0] is entry:
            return
        with self._lock:
            others = tuple(it for it in self.entries if it is not entry)
            if len(others) < len(self.entries):
                self.entries = (entry, *others)

    def keep(self, is_kept: Callable[[GuardedGraph], bool]) -> None:
        """Give up the graphs for which a predicate does not hold."""
        with self._lock:
            self.entries = tuple(filter(is_kept, self.entries))
