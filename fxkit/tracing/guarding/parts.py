"""What else of functions, classes and objects can be exchanged: code, defaults, bases."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from fxkit.tracing.bytecode.call_hooks import code_of
from fxkit.tracing.guarding.state_containers import GuardedContainer
from fxkit.tracing.values.stored import (
    attributes_of,
    has_plain_attributes,
    in_classes,
    is_a,
    mro_of,
    name_of,
    qualname_of,
)

OBJECT, FUNCTION, CLASS = range(3)
"""The kinds of what has parts, as the binding numbers them."""

_NAMES: tuple[tuple[str, ...], ...] = (
    ("__class__", "__dict__"),
    ("__code__", "__defaults__", "__kwdefaults__", "__dict__", "__name__", "__qualname__"),
    ("__class__", "__mro__", "__name__", "__qualname__"),
)


def _of_object(value: Any) -> tuple[Any, ...]:
    return type(value), attributes_of(value)


def _of_class(value: Any) -> tuple[Any, ...]:
    return type(value), mro_of(value), name_of(value), qualname_of(value)


_READ: tuple[Callable[[Any], tuple[Any, ...]], ...] = (
    _of_object,
    attrgetter(*_NAMES[1]),
    _of_class,
)
_of_object_with_dict, _of_usual_class = attrgetter(*_NAMES[OBJECT]), attrgetter(*_NAMES[CLASS])
_USUAL_LOOKUPS = (object.__getattribute__, types.ModuleType.__getattribute__, type.__getattribute__)


def kind_of(value: Any) -> int:
    """Return which parts a value has: `OBJECT`, `FUNCTION` or `CLASS`."""
    if type(value) is types.FunctionType:
        return FUNCTION
    return CLASS if is_a(value, type) else OBJECT


@dataclass(slots=True, eq=False)
class PartsHolder(GuardedContainer):
    """The code and defaults of a function, the bases of a class, the class of an object.

    Attributes are guarded in the dict that holds them; that it is this dict is guarded here.
    """

    def read(self) -> dict[Any, Any]:
        kind = kind_of(self.value)
        parts = dict(zip(_NAMES[kind], _READ[kind](self.value), strict=True))
        if kind == FUNCTION:
            parts["__code__"] = code_of(self.value)
        return parts

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        raise LookupError(self.path)

    def name_of(self, key: Any) -> str:
        return f"{self.path or 'the program'}.{key}"


def _quick_read(value: Any, kind: int) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads the parts of a value, in C where that runs no code of its class."""
    asked = type(value)
    if kind == FUNCTION or in_classes(asked, "__getattribute__") not in _USUAL_LOOKUPS:
        return _READ[kind]
    if kind == CLASS:
        return _of_usual_class
    is_usual = in_classes(asked, "__class__") is vars(object)["__class__"]
    return _of_object_with_dict if is_usual and has_plain_attributes(asked) else _of_object


class PartsWatch:
    """Tells quickly whether any of many holders of parts has changed.

    Args:
        holders: The holders.

    Attributes:
        holders: The same.
    """

    def __init__(self, holders: Iterable[PartsHolder]) -> None:
        self.holders: list[PartsHolder] = list(holders)
        groups: dict[Any, list[PartsHolder]] = {}
        for holder in self.holders:
            kind = kind_of(holder.value)
            read = _quick_read(holder.value, kind)
            groups.setdefault(read, []).append(holder)
        self._groups = [
            (
                read,
                [it.value for it in group],
                [part for it in group for part in it.entries.values()],
            )
            for read, group in groups.items()
        ]

    @property
    def state(self) -> tuple[tuple[Any, int, tuple[Any, ...]], ...]:
        """For each of them `(what has parts, its kind, its parts)`."""
        return tuple(
            (it.value, kind_of(it.value), tuple(it.entries.values())) for it in self.holders
        )

    def holds(self) -> bool:
        """Tell whether all parts are the very ones that they were."""
        for read, values, before in self._groups:
            now = chain.from_iterable(map(read, values))
            if not all(map(is_, now, before)) and any(it.difference() for it in self.holders):
                return False
        return True
