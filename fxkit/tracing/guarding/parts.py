"""What functions, classes and objects consist of beside their attributes, and can be exchanged."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from fxkit.tracing.guarding.holders import Holder
from fxkit.tracing.surroundings.hooked_code import code_of

OBJECT, FUNCTION, CLASS = range(3)
"""The kinds of what has parts, as the binding numbers them."""

_NAMES: tuple[tuple[str, ...], ...] = (
    ("__class__", "__dict__"),
    ("__code__", "__defaults__", "__kwdefaults__", "__dict__", "__name__", "__qualname__"),
    ("__class__", "__mro__", "__name__", "__qualname__"),
)


def _of_object(value: Any) -> tuple[Any, ...]:
    return value.__class__, getattr(value, "__dict__", None)


_READ: tuple[Callable[[Any], tuple[Any, ...]], ...] = (
    _of_object,
    *(attrgetter(*names) for names in _NAMES[1:]),
)
_of_object_with_dict = attrgetter(*_NAMES[OBJECT])


def kind_of(value: Any) -> int:
    """Return which parts a value has: `OBJECT`, `FUNCTION` or `CLASS`."""
    if isinstance(value, types.FunctionType):
        return FUNCTION
    return CLASS if isinstance(value, type) else OBJECT


@dataclass(slots=True, eq=False)
class PartsHolder(Holder):
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
            has_dict = kind == OBJECT and holder.entries["__dict__"] is not None
            read = _of_object_with_dict if has_dict else _READ[kind]
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
