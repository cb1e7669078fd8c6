"""Result types of calls by key, remembered for all graphs of the process."""

from __future__ import annotations

from typing import Any

from fxkit.analysis.type_inference.type_facts import FactTable
from fxkit.analysis.type_inference.type_modes import is_intercepted

MORE: Any = object()  # a remembered word: the cores do not decide it, look it up by all facts

_LIMIT = 200_000  # results and facts kept


class TypeCache:
    """Results by key.

    Args:
        shared: A memory that outlives this one, for what holds anywhere.
    """

    def __init__(self, shared: TypeCache | None = None) -> None:
        self.table = FactTable(None if shared is None else shared.table)
        self.own: dict[Any, Any] = {}
        self.shared = self.own if shared is None else shared.own

    def get(self, key: Any) -> Any:
        """Return what was remembered, or None."""
        found = self.shared.get(key)
        return self.own.get(key) if found is None and self.own else found

    def clear(self) -> None:
        """Forget all."""
        self.table.clear()
        self.own.clear()


_SHARED = TypeCache()


def new_memory() -> TypeCache:
    """Return a memory for one analysis, on top of the one that all share."""
    if len(_SHARED.own) + len(_SHARED.table) > _LIMIT:
        _SHARED.clear()
    return TypeCache(None if is_intercepted() else _SHARED)


def forget_results() -> None:
    """Forget all remembered results, as for a measurement from scratch."""
    _SHARED.clear()
