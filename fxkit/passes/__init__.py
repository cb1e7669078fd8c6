"""Passes, one a file; `PASSES` finds them by their module.

fxkit.PassManager([fxkit.passes.Canonicalise(), fxkit.passes.DeadCodeElimination()]).run(gm)
"""

from __future__ import annotations

import importlib
from typing import Any

from fxkit.passes.base import Pass, PassContext
from fxkit.passes.manager.functions import FunctionPass, pass_function
from fxkit.passes.manager.groups import FixedPoint, Group, When
from fxkit.passes.manager.instruments import DumpOnChange, Instrument, PrintAfter
from fxkit.passes.pass_registry import PASSES
from fxkit.passes.properties import graph_property

__all__ = [
    "PASSES",
    "DumpOnChange",
    "FixedPoint",
    "FunctionPass",
    "Group",
    "Instrument",
    "Pass",
    "PassContext",
    "PrintAfter",
    "When",
    "graph_property",
    "pass_function",
]


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
