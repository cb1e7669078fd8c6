"""Analyses of the graph that passes share: computed on demand, kept while they hold.

The session's journal says what changed, so nobody has to say what is still valid. An analysis that
can be brought up to date has a method `update(changes)`; any other is computed again, on demand,
once the graph has changed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from fxkit.errors import PassError
from fxkit.ir.journal import GraphChange
from fxkit.ir.session import EditSession

T = TypeVar("T")


@dataclass
class AnalysisTally:
    """What one analysis cost.

    Attributes:
        made: How often it was computed from scratch.
        updated: How often it was brought up to date.
        reused: How often it still held.
        visited: How many nodes were looked at for it, where it tells.
        seconds: How long that took.
    """

    made: int = 0
    updated: int = 0
    reused: int = 0
    visited: int = 0
    seconds: float = 0.0


@dataclass
class _Kept:
    value: Any
    graph: fx.Graph
    length: int
    last: Any


class Analyses:
    """What was computed about the graph of one session.

    Args:
        session: The session that changes the graph; without one nothing can be computed.

    Attributes:
        tallies: Name of an analysis → how often it was computed, and the seconds that took.
    """

    def __init__(self, session: EditSession | None = None) -> None:
        self._session = session
        self._kept: dict[Any, _Kept] = {}
        self.tallies: dict[str, AnalysisTally] = {}

    def get(self, make: Callable[[fx.Graph], T]) -> T:
        """Return what `make` tells of the graph as it is now."""
        session = self._session
        if session is None:
            raise PassError(
                "expected a pass that a PassManager runs, got a context without a session",
                hint="run the pass with fxkit.PassManager([...]).run(gm)",
            )
        return self.keep(make, session.graph, lambda: make(session.graph))

    def keep(self, key: Any, graph: fx.Graph, compute: Callable[[], T]) -> T:
        """Return the value kept under a key while the graph is the same, else compute it."""
        tally = self.tallies.setdefault(_name_of(key), AnalysisTally())
        kept = self._kept.get(key)
        entries = self._entries()
        if kept is not None and self._holds(kept, graph, entries):
            if kept.length == len(entries):
                tally.reused += 1
                return kept.value
            if self._update(kept, entries, tally):
                return kept.value
        start = time.perf_counter()
        value = compute()
        tally.made += 1
        tally.seconds += time.perf_counter() - start
        entries = self._entries()
        self._kept[key] = _Kept(value, graph, len(entries), entries[-1] if entries else None)
        return value

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[AnalysisTally]:
        """Add the time that the block takes to the tally of a name."""
        tally = self.tallies.setdefault(name, AnalysisTally())
        start = time.perf_counter()
        try:
            yield tally
        finally:
            tally.seconds += time.perf_counter() - start

    def _entries(self) -> Sequence[Any]:
        return () if self._session is None else self._session.journal.entries

    @staticmethod
    def _holds(kept: _Kept, graph: fx.Graph, entries: Sequence[Any]) -> bool:
        """Tell whether the journal has only grown since, if at all; undoing makes it shorter."""
        if kept.graph is not graph or len(entries) < kept.length:
            return False
        return not kept.length or entries[kept.length - 1] is kept.last

    def _update(self, kept: _Kept, entries: Sequence[Any], tally: AnalysisTally) -> bool:
        update = getattr(kept.value, "update", None)
        session = self._session
        if update is None or session is None:
            return False
        start = time.perf_counter()
        changes: Iterable[GraphChange] = session.journal[kept.length :]
        update(changes)
        tally.updated += 1
        tally.seconds += time.perf_counter() - start
        kept.length, kept.last = len(entries), entries[-1]
        return True


def _name_of(key: Any) -> str:
    return key if isinstance(key, str) else getattr(key, "__name__", type(key).__name__)
