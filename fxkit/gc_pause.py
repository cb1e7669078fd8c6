"""Python's collector of cyclic garbage, which walks all of torch's objects as others are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# CPython 3.12 freezes some hundreds of objects as it starts; a program would freeze all it has.
_FROZEN_AT_START = 1000


_seen_frozen = False


def has_frozen() -> bool:
    """Tell whether the program has frozen objects (`gc.freeze`): no search of `gc` finds those.

    To count them takes as long as there are many. So what has frozen some once is taken to have
    some from then on.
    """
    global _seen_frozen
    _seen_frozen = _seen_frozen or gc.get_freeze_count() >= _FROZEN_AT_START
    return _seen_frozen


@contextlib.contextmanager
def paused_collector(*, keeps_all: bool = True) -> Iterator[None]:
    """Collect nothing while much is made at once, most of which stays in use.

    Without a pause the collector takes a third of the time of a run of rules over 10,000 nodes, and
    of an import of all that compiles.

    Args:
        keeps_all: Whether all that is made stays in use. Then it counts as old at the end, which is
            what freezing and unfreezing does, unless the program has frozen objects of its own.
            Else what is garbage by then is found at the next collection of the young.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if keeps_all and not has_frozen():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
