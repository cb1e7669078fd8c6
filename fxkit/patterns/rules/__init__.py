"""The rules that fxkit ships, one function each; `RULES` finds them by their module."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from fxkit.patterns.rewriting import Rule
from fxkit.registry import Registry


def _rules_of(module: ModuleType) -> Iterator[tuple[str, Rule]]:
    for thing in vars(module).values():
        if isinstance(thing, Rule) and thing.file == module.__file__:
            yield thing.name, thing


RULES: Registry[Rule] = Registry("rule", __name__, _rules_of)


def rules_in(module: str) -> list[Rule]:
    """Return the rules that one file of this package defines, in order: `rules_in("algebra")`."""
    return [found for _, found in RULES.items() if found.file.endswith(f"/{module}.py")]
