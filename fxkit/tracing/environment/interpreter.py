"""Keep the interpreter from running code of others inside a program that is recorded.

That a profiler hears of each call is tried rather than taken for granted. Two more things of
CPython have to be known to watch a program with `sys.setprofile`:

A collection of cyclic garbage runs `gc.callbacks` and finalisers wherever the program happens to
allocate memory. They are no part of the program, and the profiler would take them for it.

In CPython 3.11 a profiled function asks at its entry whether anything is pending, and asks again
until nothing is. `PyThreadState_SetAsyncExc(thread, NULL)` leaves something pending for good, and
the function never begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Let no cyclic garbage be collected inside the block, nor in blocks of other threads."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


class _Settled(BaseException):
    pass


def settle() -> None:
    """Clear a request to raise in this thread that was taken back and still counts as pending.

    One that was not taken back has been raised by now: it is raised before the thread runs on.
    """
    if sys.version_info >= (3, 12):
        return
    try:
        thread = ctypes.c_ulong(threading.get_ident())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Settled))
        while True:
            pass
    except _Settled:
        return


@functools.cache
def reports_calls() -> bool:
    """Tell whether a profiler hears of calls, in each of the ways that code makes them.

    It must not be asked while there is a profiler.
    """
    seen: list[str] = []

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)
        elif event == "c_call":
            seen.append(function.__name__)

    sys.setprofile(note)
    try:
        _sample("b a", "a")
    finally:
        sys.setprofile(None)
    return seen[: len(_CALLED)] == _CALLED


_CALLED = ["_sample", "len", "split", "sorted", "ord", "inner", "max", "getrecursionlimit"]


def _sample(text: str, *letters: str) -> Any:
    def inner(value: Any) -> Any:
        return value

    size = len(text)
    words = sorted(text.split(), key=None)
    given: Any = {"default": ord(*letters)}
    return inner(len), max(words, **given), sys.getrecursionlimit(), size
