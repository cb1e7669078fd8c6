"""Whether any of many dicts has changed: by their versions, or by their content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from operator import is_
from typing import Any, Protocol

from fxkit.tracing.guarding.dict_versions import dict_version, is_counted
from fxkit.tracing.guarding.state_containers import GuardedContainer, NamespaceHolder


class _Unguarded:
    def __repr__(self) -> str:
        return "anything"


UNGUARDED = _Unguarded()


@dataclass(frozen=True, slots=True)
class WatchedTable:
    """A dict with what it has to hold, for a check elsewhere that is as quick.

    Attributes:
        table: The dict.
        version: The count of writes at which it holds for sure; 0 where nothing is counted.
        entries: What it has to hold: where all of it counts, in this order and `UNGUARDED` for what
            may be another value; what is `ABSENT` it has to lack.
        is_whole: Whether it may hold no other keys, unless `is_guarded` says that they are free.
        is_guarded: Tells whether the program may read some key; None where it reads all.
    """

    table: dict[Any, Any]
    version: int
    entries: dict[Any, Any]
    is_whole: bool
    is_guarded: Callable[[Any], bool] | None


class TableWatch(Protocol):
    """Tells whether any of some holders of dicts has changed."""

    def holds(self) -> bool:
        """Tell whether nothing that is guarded has changed."""
        ...

    def touched(self) -> list[GuardedContainer]:
        """Return the holders that may have changed since they were looked at."""
        ...

    def state(self) -> tuple[WatchedTable, ...]:
        """Return what is watched."""
        ...


def table_watch(holders: list[GuardedContainer]) -> TableWatch:
    """Return the quickest sure way to watch what holds dicts on this interpreter."""
    return _CountedTables(holders) if is_counted() else _ReadTables(holders)


class _CountedTables:
    def __init__(self, holders: list[GuardedContainer]) -> None:
        self._holders = holders
        self._dicts = [holder.value for holder in holders]
        self._versions = [holder.version for holder in holders]
        self._total = sum(self._versions)

    def holds(self) -> bool:
        # Versions only ever grow: while their sum is the same, all of them are.
        return sum(map(dict_version, self._dicts)) == self._total or self._look_closer()

    def touched(self) -> list[GuardedContainer]:
        now = map(dict_version, self._dicts)
        pairs = zip(self._holders, now, self._versions, strict=True)
        return [holder for holder, new, old in pairs if new != old]

    def state(self) -> tuple[WatchedTable, ...]:
        return tuple(map(_watched, self._holders, self._versions))

    def _look_closer(self) -> bool:
        now = list(map(dict_version, self._dicts))
        for index, (new, old) in enumerate(zip(now, self._versions, strict=True)):
            if new != old:
                if self._holders[index].difference() is not None:
                    return False
                self._versions[index] = new
        self._total = sum(self._versions)
        return True


class _ReadTables:
    def __init__(self, holders: list[GuardedContainer]) -> None:
        self._holders = holders
        self._tables: list[_ReadTable] | None = None

    def holds(self) -> bool:
        if self._tables is None:  # what has to hold is settled only after the watch is made
            self._tables = list(map(_ReadTable, self._holders))
        return all(table.holds() for table in self._tables)

    def touched(self) -> list[GuardedContainer]:
        return list(self._holders)

    def state(self) -> tuple[WatchedTable, ...]:
        return tuple(_watched(holder, 0) for holder in self._holders)


class _ReadTable:
    """A dict whose content is compared with what it was when it was last found to hold."""

    def __init__(self, holder: GuardedContainer) -> None:
        self._holder = holder
        self._note(holder.entries)

    def _note(self, content: dict[Any, Any]) -> None:
        self._keys = tuple(content)
        self._guarded = list(map(self._holder.is_guarded, content))
        self._values = list(compress(content.values(), self._guarded))

    def holds(self) -> bool:
        now = self._holder.read()
        if (
            len(now) == len(self._keys)
            and all(map(is_, now, self._keys))
            and all(map(is_, compress(now.values(), self._guarded), self._values))
        ):
            return True
        if self._holder.difference_to(now) is not None:
            return False
        self._note(now)
        return True


def _watched(holder: GuardedContainer, version: int) -> WatchedTable:
    is_namespace = isinstance(holder, NamespaceHolder)
    is_whole = not is_namespace or holder.copied
    guarded = {
        key: value if holder.is_guarded(key) else UNGUARDED for key, value in holder.entries.items()
    }
    if not is_whole:
        guarded = {key: value for key, value in guarded.items() if value is not UNGUARDED}
    is_guarded = holder.is_guarded if is_namespace else None
    return WatchedTable(holder.value, version, guarded, is_whole, is_guarded)
