"""The built-in passes by name, found by the module that each is defined in."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from fxkit.passes.base import Pass, pass_name
from fxkit.registry import Registry, defined_here


def _passes_of(module: ModuleType) -> Iterator[tuple[str, type[Pass]]]:
    for thing in vars(module).values():
        is_pass = isinstance(thing, type) and issubclass(thing, Pass) and thing is not Pass
        if is_pass and defined_here(module, thing):
            yield pass_name(thing), thing


PASSES: Registry[type[Pass]] = Registry("pass", "fxkit.passes", _passes_of)
"""The class of each built-in pass by its name: `PASSES["canonicalise"]` is `Canonicalise`."""
