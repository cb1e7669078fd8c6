"""Guards on Python state, and the quick check that none of it has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from operator import is_
from types import CellType, CodeType
from typing import Any

import torch

from fxkit.ir.types import TensorType
from fxkit.tracing.bytecode.decoding import instructions
from fxkit.tracing.guarding.aliasing_guards import storage_key
from fxkit.tracing.guarding.guards import (
    Guard,
    GuardedCall,
    Mismatch,
    shorten,
    tensor_text,
    type_text,
)
from fxkit.tracing.guarding.parts import PartsHolder, PartsWatch
from fxkit.tracing.guarding.state_containers import (
    ABSENT,
    CellHolder,
    GuardedContainer,
    SequenceHolder,
    SetHolder,
)
from fxkit.tracing.guarding.table_watch import WatchedTable, table_watch
from fxkit.tracing.values.sources import ValueSource


@dataclass(frozen=True, slots=True)
class StateGuard(Guard):
    """What the program may read of one dict, list, cell, object or class."""

    holder: GuardedContainer
    codes: frozenset[CodeType]

    @property
    def expected(self) -> str:
        """The fact, as text."""
        entries = {
            key: value for key, value in self.holder.entries.items() if self.holder.is_guarded(key)
        }
        if len(entries) == 1:
            return shorten(next(iter(entries.values())))
        return f"{len(entries)} values as when it was captured"

    def check(self, call: GuardedCall) -> Mismatch | None:
        found = self.holder.difference()
        if found is None:
            return None
        key, before, now = found
        what = self.holder.name_of(key)
        source = line_that_names(self.codes, key if isinstance(key, str) else what)
        return Mismatch(what, _text(before), _text(now), source)


def _text(value: Any) -> str:
    return tensor_text(value) if isinstance(value, torch.Tensor) else shorten(value)


@dataclass(frozen=True, slots=True)
class EmptyGuard(Guard):
    """A table of a module, such as its hooks, that has to stay empty."""

    table: dict[Any, Any]

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return "empty"

    def check(self, call: GuardedCall) -> Mismatch | None:
        return self._mismatch(f"{len(self.table)} entries") if self.table else None


@dataclass(frozen=True, slots=True)
class ExtraGuard(Guard):
    """A tensor that the program finds in its state and that may be another one at each call."""

    places: tuple[ValueSource, ...]
    kind: type
    type: TensorType
    layout: torch.layout
    apart: tuple[torch.Tensor, ...] | None

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return type_text(self.type, self.kind, self.layout)

    def check(self, call: GuardedCall) -> Mismatch | None:
        tensor = self.places[0].read()
        if not isinstance(tensor, torch.Tensor):
            return self._mismatch(shorten(tensor))
        if any(place.read() is not tensor for place in self.places):
            return self._mismatch("another tensor in one of its places")
        if any(tensor is argument for argument in call.parts.tensors):
            return self._mismatch("one of the arguments")
        if self.apart is not None and self._shares_memory(tensor, call):
            return self._mismatch("a tensor that shares memory with another one")
        same = (
            type(tensor) is self.kind
            and tensor.layout is self.layout
            and TensorType.of(tensor) == self.type
        )
        return None if same else self._mismatch(tensor_text(tensor))

    def _shares_memory(self, tensor: torch.Tensor, call: GuardedCall) -> bool:
        others = (*call.parts.tensors, *(self.apart or ()))
        return storage_key(tensor) in set(map(storage_key, others))


@dataclass(frozen=True, slots=True)
class AttributesGuard(Guard):
    """Tensor arguments have none of the attributes that the program may ask them for."""

    names: Container[str]

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return "without attributes that the program reads"

    def check(self, call: GuardedCall) -> Mismatch | None:
        found = given_attributes(call.parts.tensors, self.names)
        return None if found is None else self._mismatch(f"one with .{found}")


def given_attributes(tensors: Iterable[torch.Tensor], names: Container[str]) -> str | None:
    """Return an attribute, of some names, that one of many tensors has been given."""
    for tensor in tensors:
        attributes = vars(tensor)
        if attributes and (found := [name for name in attributes if name in names]):
            return found[0]
    return None


def line_that_names(codes: Iterable[CodeType], name: str) -> str | None:
    """Return the first line of some functions that reads a global, attribute or variable."""
    found = []
    for code in codes:
        for instruction in instructions(code):
            if instruction.argval == name and instruction.opname.startswith("LOAD"):
                line = instruction.positions.lineno if instruction.positions else None
                place = f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
                found.append(
                    (instruction.opname == "LOAD_CONST", code.co_filename, line or 0, place)
                )
    return min(found)[-1] if found else None


@dataclass(frozen=True, slots=True)
class WatchedState:
    """What a `StateWatch` looks at, for a check elsewhere that is as quick.

    Attributes:
        empties: Dicts that have to stay empty.
        tables: Dicts of which some values are guarded, or all.
        lists: `(list, items)`.
        cells: `(cell, content)`.
        parts: `(function, class or object, its kind, parts)`, as `guarding.parts` has them.
        has_more: Whether there is more, which only `holds` can tell.
        holds: The check of all of it.
    """

    empties: tuple[dict[Any, Any], ...]
    tables: tuple[WatchedTable, ...]
    lists: tuple[tuple[list[Any], tuple[Any, ...]], ...]
    cells: tuple[tuple[CellType, Any], ...]
    parts: tuple[tuple[Any, int, tuple[Any, ...]], ...]
    has_more: bool
    holds: Callable[[], bool]


# Tables of a module that are empty while those beside them are, or that only these methods ask.
_ASKED_BY = {
    "_forward_hooks_with_kwargs": (),
    "_forward_hooks_always_called": (),
    "_forward_pre_hooks_with_kwargs": (),
    "_state_dict_hooks": ("state_dict",),
    "_state_dict_pre_hooks": ("state_dict",),
    "_load_state_dict_pre_hooks": ("load_state_dict", "_load_from_state_dict"),
    "_load_state_dict_post_hooks": ("load_state_dict", "_load_from_state_dict"),
}


def is_asked(path: str, names: Container[str], reads_all: bool) -> bool:
    """Tell whether a program may look into a table of a module that is empty.

    Args:
        path: The table, as `EnvironmentWalk.empties` names it.
        names: The attributes that the program's code reads.
        reads_all: Whether it may read others.
    """
    table = path.rpartition(".")[2]
    methods = _ASKED_BY.get(table)
    if methods is None or table in names or (reads_all and methods):
        return True
    return any(method in names for method in methods)


class StateWatch:
    """Tells quickly whether any of many holders has changed.

    Args:
        holders: What is watched.
        empties: Dicts that have to stay empty.
    """

    def __init__(self, holders: list[GuardedContainer], empties: list[dict[Any, Any]]) -> None:
        self._empties = empties
        self._tables = table_watch([it for it in holders if it.versioned() is not None])
        rest = [it for it in holders if it.versioned() is None]
        self._cells = [(it, it.value, it.entries[None]) for it in rest if _is_full_cell(it)]
        self._lists = [
            (it, it.value, list(it.entries.values())) for it in rest if type(it) is SequenceHolder
        ]
        self._sets = [(it, it.value, set(it.entries)) for it in rest if type(it) is SetHolder]
        self._parts = PartsWatch(it for it in rest if isinstance(it, PartsHolder))
        self._others = [
            it
            for it in rest
            if not _is_full_cell(it) and type(it) not in (SequenceHolder, SetHolder, PartsHolder)
        ]

    def holds(self) -> bool:
        """Tell whether nothing that is guarded has changed."""
        if any(self._empties):
            return False
        if not self._tables.holds():
            return False
        for holder, cell, value in self._cells:
            if cell.cell_contents is not value and holder.difference() is not None:
                return False
        for holder, items, before in self._lists:
            same = type(items) is list and len(items) == len(before)
            if not (same and all(map(is_, items, before))) and holder.difference() is not None:
                return False
        for holder, items, before in self._sets:
            if (type(items) is not set or items != before) and holder.difference() is not None:
                return False
        if not self._parts.holds():
            return False
        return all(holder.difference() is None for holder in self._others)

    def state(self) -> WatchedState:
        """Return what is watched."""
        lists = [(items, tuple(before)) for _, items, before in self._lists if type(items) is list]
        return WatchedState(
            tuple(self._empties),
            self._tables.state(),
            tuple(lists),
            tuple((cell, value) for _, cell, value in self._cells),
            self._parts.state,
            bool(self._others or self._sets) or len(lists) < len(self._lists),
            self.holds,
        )

    def touched(self) -> list[GuardedContainer]:
        """Return the holders that may have changed since they were looked at."""
        rest = [it[0] for it in (*self._cells, *self._lists, *self._sets)]
        return [*self._tables.touched(), *rest, *self._parts.holders, *self._others]


def _is_full_cell(holder: GuardedContainer) -> bool:
    return isinstance(holder, CellHolder) and holder.entries[None] is not ABSENT
