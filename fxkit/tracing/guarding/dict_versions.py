"""Dict versions: a counter of writes to a dict, on interpreters whose counter misses none.

CPython 3.11 counts up a number at each write to any dict. Later interpreters don't; what torch
counts there instead hears of writes from the interpreter, and CPython 3.13 says nothing of an
attribute that is set on an object. Where nothing is known to count each write, dicts are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fxkit.torch_adapters.guards import count_of_writes

_COUNTING = ("cpython", (3, 11))


def is_counted() -> bool:
    """Tell whether each write to a dict is counted."""
    is_counting = (sys.implementation.name, sys.version_info[:2]) == _COUNTING
    return is_counting and count_of_writes is not None


def _always_the_same(table: dict[Any, Any], /) -> int:
    return 0


dict_version: Callable[[dict[Any, Any]], int] = _always_the_same
"""Return a number that is another one after each write to a dict, if writes are counted."""

if is_counted() and count_of_writes is not None:
    dict_version = count_of_writes
