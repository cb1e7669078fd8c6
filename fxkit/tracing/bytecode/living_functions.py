"""The living functions that have some code, those included that `gc.freeze` hides from searches."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Set
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fxkit.gc_pause import has_frozen

MAX_OBJECTS = 50_000
"""How many objects are looked at for frozen functions."""


def functions_of(codes: Iterable[CodeType]) -> list[FunctionType]:
    """Return the living functions that have one of some codes; looks at all objects there are.

    Where a program has frozen objects (`gc.freeze`), what the modules that the code comes from
    hold, directly or not, is looked at too.
    """
    wanted = frozenset(codes)
    if not wanted:
        return []
    found = [one for one in gc.get_referrers(*wanted) if type(one) is FunctionType]
    if has_frozen():
        known = {id(one) for one in found}
        found += [one for one in _held_by_modules(wanted) if id(one) not in known]
    return [one for one in found if one.__code__ in wanted]


def _held_by_modules(codes: Set[CodeType]) -> Iterable[FunctionType]:
    """Yield the functions with some codes that can be reached from the modules of the code."""
    files = {code.co_filename for code in codes}
    modules = [one for one in list(sys.modules.values()) if type(one) is ModuleType]
    seen = {id(vars(module)) for module in modules}  # no module is entered by way of another one
    todo: deque[Any] = deque(vars(module) for module in modules if _may_hold(module, files))
    while todo and len(seen) < MAX_OBJECTS:
        for value in gc.get_referents(todo.popleft()):
            if id(value) in seen or not gc.is_tracked(value) or type(value) is ModuleType:
                continue
            seen.add(id(value))
            todo.append(value)
            if type(value) is FunctionType:
                yield value


def _may_hold(module: ModuleType, files: Set[str]) -> bool:
    """Tell whether code from some files was run for a module: its own, or cells of a notebook."""
    name = vars(module).get("__name__")
    own = {vars(module).get("__file__"), f"<frozen {name}>"}
    return name == "__main__" or not own.isdisjoint(files)
