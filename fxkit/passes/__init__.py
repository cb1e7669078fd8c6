"""Passes, one a file; `PASSES` finds them by their module.

fxkit.PassManager([fxkit.passes.Canonicalise(), fxkit.passes.DeadCodeElimination()]).run(gm)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from fxkit.passes.base import Pass, PassContext, pass_name
from fxkit.passes.manager.functions import DecoratedPass, FunctionPass, pass_function
from fxkit.passes.manager.groups import FixedPoint, Group, When
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.properties import graph_property
from fxkit.registry import Registry, defined_here

__all__ = [
    "PASSES",
    "FixedPoint",
    "FunctionPass",
    "Group",
    "Instrument",
    "Pass",
    "PassContext",
    "When",
    "graph_property",
    "pass_function",
]

_NOT_LISTED = (Pass, DecoratedPass, FunctionPass)


def _passes_of(module: ModuleType) -> Iterator[tuple[str, type[Pass]]]:
    for thing in vars(module).values():
        is_pass = isinstance(thing, type) and issubclass(thing, Pass)
        if is_pass and thing not in _NOT_LISTED and defined_here(module, thing):
            yield pass_name(thing), thing


PASSES: Registry[type[Pass]] = Registry("pass", __name__, _passes_of)
"""The class of each built-in pass by its name: `PASSES["canonicalise"]` is `Canonicalise`."""


def __getattr__(name: str) -> Any:
    if name == "pipelines":  # imported when it is asked for, since it imports every pass
        return importlib.import_module(f"{__name__}.pipelines")
    if not name[:1].isupper():  # no pass; a module of this package may be half imported just now
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for cls in (cls for _, cls in PASSES.items()):
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"fxkit.passes has no pass {name!r}; it has {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(cls.__name__ for _, cls in PASSES.items())])
