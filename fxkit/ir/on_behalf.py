"""What the new nodes of a graph under edit stand for, for the length of a block."""

from __future__ import annotations

from torch import fx

from fxkit.ir.journalled_graph import JournalledGraph


class OnBehalf:
    """Sets what a session's new nodes stand for; a class, since every rewrite enters it."""

    __slots__ = ("_other", "_session")

    def __init__(self, session: JournalledGraph, originals: tuple[fx.Node, ...], by: str) -> None:
        self._session = session
        self._other = originals, by

    def __enter__(self) -> None:
        session = self._session
        outer = session.originals, session.by
        session.originals, session.by = self._other
        self._other = outer

    def __exit__(self, *_: object) -> None:
        self._session.originals, self._session.by = self._other
