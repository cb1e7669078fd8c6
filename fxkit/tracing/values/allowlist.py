"""The allowlist of packages that keep no state on which a result could depend.

What lies in them is not looked into: torch (its calls are what is recorded, and its modes are
guarded), NumPy, and the parts of the standard library that only compute.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from fxkit.tracing.values.stored import module_of

_PURE = frozenset(
    """
    torch numpy fxkit builtins abc collections functools contextlib dataclasses enum typing types
    copy copyreg re operator inspect itertools math cmath random weakref string numbers textwrap
    keyword heapq bisect reprlib pprint fractions decimal statistics ast dis opcode token tokenize
    importlib genericpath posixpath ntpath stat fnmatch encodings codecs struct json hashlib base64
    traceback linecache typing_extensions _weakrefset _collections_abc _py_abc __future__
    annotationlib sympy networkx
    """.split()
)


@functools.lru_cache(maxsize=4096)
def is_allowlisted(module: str | None) -> bool:
    """Tell whether a module, by its dotted name, is one that is not looked into."""
    if module is None:
        return False
    if module.startswith("namedtuple_"):
        return True
    return module.partition(".")[0] in _PURE


def is_allowlisted_class(kind: type) -> bool:
    """Tell whether a class is defined in such a module."""
    return is_allowlisted(module_of(kind))


def is_standard(value: Any) -> bool:
    """Tell whether a class or function is defined in Python's standard library."""
    module = module_of(value) if isinstance(value, type) else getattr(value, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names
