"""State that is no container of Python: thread locals, context variables, arrays, memos."""

from __future__ import annotations

import gc
import types
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from fxkit.tracing.guarding.state_containers import ABSENT, PLAIN, GuardedContainer

_KEPT = PLAIN | {type, dict, tuple, object, types.FunctionType}


@dataclass(slots=True, eq=False)
class LocalHolder(GuardedContainer):
    """What a `threading.local` holds in the thread that asks."""

    def read(self) -> dict[Any, Any]:
        return dict(vars(self.value))

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        attributes = vars(self.value)
        for name, item in changes.items():
            if item is ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = item

    def name_of(self, key: Any) -> str:
        return f"{self.path}.{key}".lstrip(".")


@dataclass(slots=True, eq=False)
class ContextHolder(GuardedContainer):
    """The value of a `contextvars.ContextVar` in the context that asks."""

    def read(self) -> dict[Any, Any]:
        return {None: self.value.get(ABSENT)}

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        if changes[None] is not ABSENT:
            self.value.set(changes[None])

    def name_of(self, key: Any) -> str:
        return self.path


@dataclass(slots=True, eq=False)
class WeakHolder(GuardedContainer):
    """Whether what a weak reference refers to is alive; it is not kept alive for that."""

    def read(self) -> dict[Any, Any]:
        return {None: weakref.ref.__call__(self.value) is not None}

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        """Do nothing: it dies again by itself."""

    def name_of(self, key: Any) -> str:
        return f"{self.path}()"


@dataclass(slots=True, eq=False)
class ArrayHolder(GuardedContainer):
    """The numbers in a NumPy array."""

    def read(self) -> dict[Any, Any]:
        array: np.ndarray = self.value
        return {None: (array.dtype.str, array.shape, np.ndarray.tobytes(array)).__repr__()}

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        raise LookupError(self.path)

    def name_of(self, key: Any) -> str:
        return self.path


@dataclass(slots=True, eq=False)
class MemoHolder(GuardedContainer):
    """How often a function under `functools.lru_cache` was computed, and how much it keeps."""

    def read(self) -> dict[Any, Any]:
        info = self.value.cache_info()
        return {"misses": info.misses, "currsize": info.currsize}

    def keeps_plain_values(self) -> bool:
        """Tell whether all that is kept are plain values, which are the same when computed anew."""
        own = vars(self.value)
        kept = [part for part in gc.get_referents(self.value) if part is not own]
        kept += [item for part in kept if type(part) is dict for item in part.values()]
        kept += [item for part in kept if type(part) is tuple for item in part]
        return all(type(item) in _KEPT or type(item).__name__ == "_lru_list_elem" for item in kept)

    def write(self, changes: dict[Any, Any], now: dict[Any, Any]) -> None:
        raise LookupError(self.path)

    def name_of(self, key: Any) -> str:
        return f"{self.path}.cache_info().{key}"
