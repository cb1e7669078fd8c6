"""Stop Python code that does not come to an end."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from fxkit.tracing.environment.interpreter import no_collection


class OutOfTime(BaseException):
    """Time is up; raised inside the code that took too long."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `OutOfTime` inside the block once it has run for too long.

    A call into compiled code is left to return first. No cyclic garbage is collected meanwhile:
    what is raised inside of a finaliser or a callback of the collector is lost, and warned of.

    Args:
        seconds: How long the block may take; None for any time.
    """
    if seconds is None:
        yield
        return
    with no_collection():
        alarm = _Alarm(threading.get_ident())
        timer = threading.Timer(seconds, alarm.ring)
        timer.daemon = True
        try:
            timer.start()
            yield
        finally:
            timer.cancel()
            alarm.turn_off()


class _Alarm:
    """Raises in another thread, unless it was turned off before.

    It goes on once a second until then: what is raised inside of a finaliser is lost.
    """

    def __init__(self, thread: int) -> None:
        self._thread = ctypes.c_ulong(thread)
        self._lock = threading.Lock()
        self._has_rung = False
        self._off = threading.Event()

    def ring(self) -> None:
        while True:
            with self._lock:
                if self._off.is_set():
                    return
                self._has_rung = True
                _raise_in(self._thread)
            self._off.wait(1.0)

    def turn_off(self) -> None:
        with self._lock:
            self._off.set()
        if not self._has_rung:
            return
        # One that has not been raised yet is replaced by one that is raised here. Taking it back
        # with NULL leaves CPython 3.11 with something pending for good: profiled code then hangs.
        try:
            _raise_in(self._thread)
            while True:
                pass
        except OutOfTime:
            return


def _raise_in(thread: ctypes.c_ulong) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutOfTime))
