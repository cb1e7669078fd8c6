"""Which sessions are open in a thread: one opened inside on the same module joins that around it.

So `fxkit.rewrite(edit.gm, rules)` in a pass, or `outline(gm, nodes, name)` inside of
`with fxkit.edit(gm)`, is taken back with everything else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import fx

from fxkit.ir.journalled_graph import JournalledGraph
from fxkit.ir.program_changes import ProgramChange, program_of_graph

_thread = threading.local()


def open_on(gm: fx.GraphModule) -> JournalledGraph | None:
    """Return the session that is open on a module in this thread, or None."""
    return next((session for session in reversed(_sessions()) if session.gm is gm), None)


@contextlib.contextmanager
def opened(session: JournalledGraph, change: ProgramChange | None = None) -> Iterator[None]:
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
        around.recompile()
    sessions.append(session)
    try:
        yield
        is_through = True
    finally:
        sessions.remove(session)
        if around is not None:
            around.take_over(session)
        is_kept = session.is_modified or (is_through and change is not None)
        if program is not None and noted is not None and is_kept:
            program.note_change(session.gm, noted)


def _sessions() -> list[JournalledGraph]:
    if not hasattr(_thread, "sessions"):
        _thread.sessions = []
    return _thread.sessions
