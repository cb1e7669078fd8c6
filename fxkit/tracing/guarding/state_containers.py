"""Guarded containers of Python state: their content before a run, whether it holds, and writes.

Where the interpreter counts the writes to a dict (see `dict_versions`), its content is compared
only when that count has changed; a state that stays as it is costs some ten nanoseconds a dict.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fxkit.ir.types import TensorType
from fxkit.tracing.guarding.dict_versions import dict_version
from fxkit.tracing.values.scalar_inputs import AnyScalar
from fxkit.tracing.values.sources import ValueSource
from fxkit.tracing.values.stored import Slot, in_slot, is_a
from fxkit.tracing.values.texts import text_of

PLAIN = frozenset(
    {
        *(bool, int, float, str, bytes, type(None), complex, range, slice, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    }
)


# Special names of classes that no operator asks for.
_IDLE = frozenset(
    """
    __doc__ __annotations__ __slotnames__ __module__ __dict__ __weakref__ __abstractmethods__
    __static_attributes__ __firstlineno__ __type_params__ __orig_bases__ __parameters__
    __annotate__ __annotate_func__ __annotations_cache__ __qualname__ __wrapped__
    """.split()
)


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()

Change = tuple[Any, Any, Any]


def is_same_value(now: Any, before: Any) -> bool:
    """Tell whether two values of one place are the same object, or equal and of one plain type."""
    if now is before:
        return True
    if type(now) is not type(before) or type(now) not in PLAIN:
        return False
    if type(now) is float:
        return now.hex() == before.hex()
    return now == before and repr(now) == repr(before)


def content(cell: types.CellType) -> Any:
    """Return what a variable of a closure holds, or `ABSENT`."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _has_type(value: Any, expected: TensorType | AnyScalar) -> bool:
    if isinstance(expected, AnyScalar):
        return expected.has(value)
    return isinstance(value, torch.Tensor) and TensorType.of(value) == expected


@dataclass(slots=True, eq=False)
class GuardedContainer(ABC):
    """Something that holds values: `entries` are those it held when it was looked at.

    Attributes:
        value: The dict, list, cell or object.
        path: What messages call it.
        entries: `{key: value}` of what it held.
        lenient: Keys whose tensors or numbers may be replaced by others, and their type.
        version: The count of writes to the dict before it was read, where there is one.
        foreign: Keys whose values opaque calls change, which no graph writes again.
    """

    value: Any
    path: str
    entries: dict[Any, Any] = field(default_factory=dict)
    lenient: dict[Any, TensorType | AnyScalar] = field(default_factory=dict)
    version: int = 0
    foreign: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        table = self.versioned()
        if table is not None:
            self.version = dict_version(table)
        self.entries = self.read()

    @abstractmethod
    def read(self) -> dict[Any, Any]:
        """Return what it holds now."""

    @abstractmethod
    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        """Give some keys other values; `ABSENT` removes a key.

        Args:
            changes: The new values.
            now: All that it has to hold afterwards, in order.
        """

    def versioned(self) -> dict[Any, Any] | None:
        """Return the dict whose content is all that is read, or None."""
        return None

    def place(self, key: Any) -> ValueSource:
        """Return the place of one value."""
        return ValueSource(self.value, key, self.name_of(key))

    def name_of(self, key: Any) -> str:
        """Return what messages call the place of a key."""
        return f"{self.path}[{text_of(key)}]"

    def is_guarded(self, key: Any) -> bool:
        """Tell whether the program may read the value of a key."""
        return True

    def difference(self) -> tuple[Any, Any, Any] | None:
        """Return `(key, before, now)` of the first value that is another one."""
        return self.difference_to(self.read())

    def difference_to(self, now: dict[Any, Any]) -> tuple[Any, Any, Any] | None:
        """Return `(key, before, now)` of the first value that is another one in what was read."""
        for key, before in self.entries.items():
            current = now.get(key, ABSENT)
            if is_same_value(current, before) or not self.is_guarded(key):
                continue
            if key in self.lenient and _has_type(current, self.lenient[key]):
                continue
            return key, before, current
        if len(now) != len(self.entries) or self.is_ordered():
            return self._other_keys(now)
        return None

    def is_ordered(self) -> bool:
        """Tell whether the order of keys is part of the content."""
        return False

    def _other_keys(self, now: dict[Any, Any]) -> tuple[Any, Any, Any] | None:
        ours = [key for key in self.entries if self.is_guarded(key)]
        theirs = [key for key in now if self.is_guarded(key)]
        for key in theirs:
            if key not in self.entries:
                return key, ABSENT, now[key]
        if self.is_ordered() and ours != theirs:
            return ours[0] if ours else None, "in another order", "as it is"
        return None

    def changes(self) -> dict[Any, Any]:
        """Return the values that are other ones now, by key, whether guarded or not."""
        now = self.read()
        found = {
            key: current
            for key, current in now.items()
            if not is_same_value(current, self.entries.get(key, ABSENT)) and key not in self.foreign
        }
        for key, before in self.entries.items():
            if key not in now and key not in self.foreign and before is not ABSENT:
                found[key] = ABSENT
        if not found and self.is_ordered() and list(now) != list(self.entries):
            return dict(now)
        return found


@dataclass(slots=True, eq=False)
class DictHolder(GuardedContainer):
    """A dict that is a value of the program: all of it, in order."""

    def read(self) -> dict[Any, Any]:
        # Methods that a subclass may have overridden, to compute what it gives, are not asked.
        value = self.value
        if is_a(value, OrderedDict):
            return {key: dict.__getitem__(value, key) for key in OrderedDict.__iter__(value)}
        return dict(dict.items(value))

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        kind = OrderedDict if is_a(self.value, OrderedDict) else dict
        for key, item in changes.items():
            if item is ABSENT:
                kind.pop(self.value, key, None)
            else:
                kind.__setitem__(self.value, key, item)
        if list(kind.__iter__(self.value)) != list(now):
            values = self.read()
            kind.clear(self.value)
            for key in now:
                kind.__setitem__(self.value, key, values[key])

    def versioned(self) -> dict[Any, Any] | None:
        return self.value if type(self.value) in (dict, defaultdict) else None

    def is_ordered(self) -> bool:
        return True


@dataclass(slots=True, eq=False)
class NamespaceHolder(GuardedContainer):
    """The attributes of an object or class, or globals: those whose names the program reads.

    Attributes:
        names: Those names; grows while the program is looked at. None for all.
        copied: Whether all that it holds is copied, so that each change is seen.
        is_sealed: Whether only code that names an attribute reads it, and none by computed names.
        extra: More names, which are read without being named.
        has_specials: Whether names such as `__len__`, which operators ask for, count as well.
        assign: Sets an attribute, where writing to the dict is not the way.
    """

    names: set[str] | None = None
    copied: bool = True
    is_sealed: bool = False
    extra: frozenset[str] = frozenset()
    has_specials: bool = False
    assign: Callable[[str, Any], None] | None = None

    def add(self, name: str) -> Any:
        """Look at one more name, and return what it holds."""
        if name not in self.entries:
            self.entries[name] = dict.get(self.value, name, ABSENT)
        return self.entries[name]

    def read(self) -> dict[Any, Any]:
        if self.copied:
            return dict(dict.items(self.value))
        return {key: dict.get(self.value, key, ABSENT) for key in self.entries}

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        for key, item in changes.items():
            if self.assign is not None:
                self.assign(key, item)
            elif item is ABSENT:
                dict.pop(self.value, key, None)
            else:
                dict.__setitem__(self.value, key, item)

    def versioned(self) -> dict[Any, Any] | None:
        return self.value if is_a(self.value, dict) else None

    def name_of(self, key: Any) -> str:
        return f"{self.path}.{key}".lstrip(".")

    def is_guarded(self, key: Any) -> bool:
        if self.names is None or key in self.names or key in self.extra:
            return True
        return self.has_specials and key[:2] == key[-2:] == "__" and key not in _IDLE

    def widen(self) -> None:
        """Let all names count from now on."""
        self.copied, self.names = True, None
        self.entries = self.read()


@dataclass(slots=True, eq=False)
class GlobalsHolder(NamespaceHolder):
    """Globals of a module by name; it counts as well that it lacks some."""

    copied: bool = False

    def changes(self) -> dict[Any, Any]:
        # What an import adds is there when the graph runs: it is no write of the program.
        found = GuardedContainer.changes(self)
        return {key: value for key, value in found.items() if not self._is_import(key, value)}

    def settle(self) -> None:
        """Take the modules that the run has imported for what was there before."""
        for key, value in self.read().items():
            if self._is_import(key, value):
                self.entries[key] = value

    def _is_import(self, key: Any, value: Any) -> bool:
        return isinstance(value, types.ModuleType) and self.entries.get(key, ABSENT) is ABSENT


@dataclass(slots=True, eq=False)
class SequenceHolder(GuardedContainer):
    """A list or deque."""

    def read(self) -> dict[Any, Any]:
        kind: Any = deque if is_a(self.value, deque) else list
        return dict(enumerate(kind.__iter__(self.value)))

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        if is_a(self.value, deque):
            deque.clear(self.value)
            deque.extend(self.value, now.values())
        else:
            list.__setitem__(self.value, slice(None), now.values())

    def name_of(self, key: Any) -> str:
        return f"{self.path}[{key}]"


@dataclass(slots=True, eq=False)
class SetHolder(GuardedContainer):
    """A set."""

    def read(self) -> dict[Any, Any]:
        return dict.fromkeys(set.__iter__(self.value), True)

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        set.clear(self.value)
        set.update(self.value, now)


@dataclass(slots=True, eq=False)
class CellHolder(GuardedContainer):
    """A variable of a closure."""

    def read(self) -> dict[Any, Any]:
        return {None: content(self.value)}

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        self.value.cell_contents = changes[None]

    def name_of(self, key: Any) -> str:
        return self.path


@dataclass(slots=True, eq=False)
class SlotsHolder(GuardedContainer):
    """The slots of an object; what only `getattr` computes is no state of it."""

    slots: dict[str, Slot] = field(default_factory=dict)

    def read(self) -> dict[Any, Any]:
        return {name: in_slot(self.value, slot, ABSENT) for name, slot in self.slots.items()}

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        for name, item in changes.items():
            if item is ABSENT:
                self.slots[name].__delete__(self.value)
            else:
                self.slots[name].__set__(self.value, item)

    def name_of(self, key: Any) -> str:
        return f"{self.path}.{key}".lstrip(".")

    def place(self, key: Any) -> ValueSource:
        return ValueSource(Slots(self.value, self.slots), key, self.name_of(key))


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Lets a place read a slot as it reads a key."""

    value: Any
    slots: dict[str, Slot]

    def __getitem__(self, name: str) -> Any:
        found = in_slot(self.value, self.slots[name], ABSENT)
        if found is ABSENT:
            raise KeyError(name)
        return found
