"""Which sessions are open in a thread: one opened inside on the same module joins that around it.

So `fxkit.rewrite(edit.gm, rules)` in a pass, or `outline(gm, nodes, name)` inside of
`with fxkit.edit(gm)`, is taken back with everything else.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import fx

from fxkit.errors import RewriteError
from fxkit.ir.program_changes import ProgramChange, program_of_graph


class OpenSession(Protocol):
    """What is known of a session here: a `JournalledGraph`.

    Attributes:
        gm: The module under edit.
        number: Once it is over and has changed something, its place among all sessions.
        number_before: That of the session which changed the module before it.
    """

    gm: fx.GraphModule
    number: int | None
    number_before: int

    @property
    def is_modified(self) -> bool:
        """Whether the session has changed the graph."""
        ...

    def outdate(self) -> None:
        """Let the code of the module be generated anew."""
        ...

    def take_over(self, inner: Any) -> None:
        """Add what another session has changed in the same module."""
        ...


_thread = threading.local()

# Module → the outermost session that is open on it, and its thread.
_outermost: weakref.WeakKeyDictionary[fx.GraphModule, tuple[OpenSession, int]] = (
    weakref.WeakKeyDictionary()
)

# Module → number of the session that was the last to change it, of those that are over.
_last_changes: weakref.WeakKeyDictionary[fx.GraphModule, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def open_on(gm: fx.GraphModule) -> OpenSession | None:
    """Return the session that is open on a module in this thread, or None."""
    return next((session for session in reversed(_sessions()) if session.gm is gm), None)


@contextlib.contextmanager
def opened(session: OpenSession, change: ProgramChange | None = None) -> Iterator[None]:
    """Let sessions that are opened on the same module inside the block join this one.

    When one is open around it already, that one takes over all that this one has changed, however
    the block is left. Else the program that the graph is of, if there is one, notes the change.

    Args:
        session: The session.
        change: What is going to be applied; an edit when left out.
    """
    sessions, around = _sessions(), open_on(session.gm)
    program = None if around is not None else program_of_graph(session.gm)
    noted = None if program is None else program.begin_change(session.gm, change)
    is_through = False
    if around is not None:
        around.outdate()
    else:
        _outermost[session.gm] = session, threading.get_ident()
    sessions.append(session)
    try:
        yield
        is_through = True
    finally:
        sessions.remove(session)
        if around is None:
            _outermost.pop(session.gm, None)
        if around is not None:
            around.take_over(session)
            session.number = 0
        elif session.is_modified:
            session.number_before = _last_changes.get(session.gm, 0)
            session.number = _last_changes[session.gm] = next(_numbers)
        is_kept = session.is_modified or (is_through and change is not None)
        if program is not None and noted is not None and is_kept:
            program.note_change(session.gm, noted)


def is_open(session: OpenSession) -> bool:
    """Tell whether this thread has a session open."""
    return any(other is session for other in _sessions())


def check_is_latest(session: OpenSession) -> None:
    """Refuse to go on with a session that is over when another has changed its module since.

    Raises:
        RewriteError: When one has, has one open, or has taken the changes over.
    """
    is_latest = session.number in (None, _last_changes.get(session.gm, 0))
    if session.is_modified and not (is_latest and open_on(session.gm) is None):
        raise RewriteError(
            "expected the graph as the session has left it, got one that another session changes",
            hint="undo the later session first, or in it: edit.undo(edit.mark())",
        )


def check_no_other_session(gm: fx.GraphModule) -> None:
    """Refuse to generate code of a graph that another thread is changing.

    Raises:
        RewriteError: When a session of another thread is open that has changed it.
    """
    session, thread = _outermost.get(gm, (None, None))
    if session is not None and session.is_modified and thread != threading.get_ident():
        raise RewriteError(
            "expected a graph that no other thread is changing, got one in an open edit session",
            hint="call the module, or read its .code, before that session: it keeps that code",
        )


def forget(session: OpenSession) -> None:
    """Take note that all that a session which is over had changed is taken back."""
    if session.number and not session.is_modified:
        _last_changes[session.gm] = session.number_before
        session.number = None


def _sessions() -> list[OpenSession]:
    if not hasattr(_thread, "sessions"):
        _thread.sessions = []
    return _thread.sessions
