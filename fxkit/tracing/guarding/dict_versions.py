"""The count of writes to a dict, where the interpreter keeps one that misses none.

CPython 3.11 counts up a number at each write to any dict. Later interpreters don't; what torch
counts there instead hears of writes from the interpreter, and CPython 3.13 says nothing of an
attribute that is set on an object. Where nothing is known to count each write, dicts are read.
"""

from __future__ import annotations

import sys
from typing import Any

_COUNTING = ("cpython", (3, 11))


def is_counted() -> bool:
    """Tell whether each write to a dict is counted."""
    return (sys.implementation.name, sys.version_info[:2]) == _COUNTING


if is_counted():
    from torch._C._dynamo.guards import dict_version
else:

    def dict_version(table: dict[Any, Any], /) -> int:
        """Return always the same, as nothing is counted."""
        return 0
