"""The attribute names that code reads, and objects that wait until some code reads theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fxkit.tracing.environment.object_kinds import names_of_tensors

Visit = tuple[Any, str]


class WantedNames:
    """Which attributes a program may read, as far as its code has been looked at.

    Attributes:
        names: The attributes that the code reads.
        asked: Those that it asks or sets, by which tensors may be given attributes of their own.
        reads_all: Whether it may read attributes by names that are not written in it.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.asked: set[str] = set()
        self.reads_all = False
        self._waiting: dict[str, list[Visit]] = defaultdict(list)
        self._any: list[Visit] = []

    def put_off(self, name: str, visit: Visit, *, is_only_named: bool) -> None:
        """Keep something until its name is read.

        Args:
            name: The name.
            visit: The object and its path.
            is_only_named: Whether nothing reads it by a computed name.
        """
        self._waiting[name].append(visit)
        if not is_only_named:
            self._any.append(visit)

    def add(self, names: Iterable[str], asked: frozenset[str]) -> tuple[list[str], list[Visit]]:
        """Note names that are read, and return the new ones with what has waited for them."""
        new = [name for name in names if name not in self.names]
        self.names.update(new)
        self.asked |= asked - names_of_tensors()
        return new, [visit for name in new for visit in self._waiting.pop(name, ())]

    def add_all(self) -> list[Visit]:
        """Note that any name may be read, and return what has waited for that."""
        self.reads_all = True
        found, self._any = self._any, []
        return found
