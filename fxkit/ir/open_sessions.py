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

_thread = threading.local()


def open_on(gm: fx.GraphModule) -> JournalledGraph | None:
    """Return the session that is open on a module in this thread, or None."""
    return next((session for session in reversed(_sessions()) if session.gm is gm), None)


@contextlib.contextmanager
def opened(session: JournalledGraph) -> Iterator[None]:
    """Let sessions that are opened on the same module inside the block join this one.

    When one is open around it already, that one takes over all that this one has changed, however
    the block is left.
    """
    sessions, around = _sessions(), open_on(session.gm)
    if around is not None:
        around.recompile()
    sessions.append(session)
    try:
        yield
    finally:
        sessions.remove(session)
        if around is not None:
            around.take_over(session)


def _sessions() -> list[JournalledGraph]:
    if not hasattr(_thread, "sessions"):
        _thread.sessions = []
    return _thread.sessions
