"""A moment until which building may last: what is under way then is stopped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

_moment: ContextVar[float | None] = ContextVar("moment until which building may last", default=None)


class DeadlinePassed(BaseException):
    """Raised when the moment has come; no fault, so that what handles faults lets it through."""


@contextlib.contextmanager
def until(moment: float) -> Iterator[None]:
    """Let builds and trials of this thread last until a moment, and raise `DeadlinePassed` then.

    Args:
        moment: Seconds, as `time.monotonic` tells them.
    """
    token = _moment.set(moment)
    try:
        yield
    finally:
        _moment.reset(token)


def remaining() -> float | None:
    """Return the seconds that are left, or None where there is no end.

    Raises:
        DeadlinePassed: When none are left.
    """
    moment = _moment.get()
    if moment is None:
        return None
    left = moment - time.monotonic()
    if left <= 0:
        raise DeadlinePassed
    return left
