"""Flatten nested Python values into tensors and a structure, and rebuild them.

torch's own pytree stops at objects that nobody registered, and it forgets which containers are the
same. A captured call needs both: a key-value cache is an ordinary object that holds tensors, and a
list that was passed in has to be the list that was changed.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from fxkit.errors import CaptureError
from fxkit.tracing.values.contents import PLAIN, content_of, content_of_dict_of_a_class
from fxkit.tracing.values.stored import (
    is_a,
    is_comparable,
)
from fxkit.tracing.values.symbolic_scalars import SYMBOLIC, has_symbolic

_LIMIT = 20_000

_BY_IDENTITY = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type),
    *(torch.nn.Module, torch.Generator),
)

_MADE_BY_CALLS = (types.FunctionType, types.MethodType, torch.nn.Module, torch.Generator)

Path = tuple[str, ...]


@dataclass(slots=True)
class Parts:
    """A nested value, taken apart.

    Attributes:
        tensors: The tensors in it, in the order of torch's pytree.
        tokens: What the rest looks like; two values with equal tokens differ in tensors only.
        paths: Where each token lies, as text: `args[0]['mask']`.
        tensor_paths: Where each tensor lies.
        containers: The containers in it that a program may change, in the order of the walk.
        container_paths: Where each container lies.
        arrays: The NumPy arrays in it.
        modules: The modules in it, with their paths.
        alive: The objects that tokens name by `id`.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    tensor_paths: list[str] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    container_paths: list[str] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    modules: list[tuple[str, torch.nn.Module]] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)
    _seen: dict[int, int] = field(default_factory=dict)

    def add(self, value: Any, path: str) -> None:
        """Take `value` apart and append what is found."""
        kind = type(value)
        if not is_comparable(kind):
            self.alive.append(value)
            self._token(("an object of a class that can't be compared", id(value)), path)
        elif is_a(value, torch.Tensor):
            # One without a shape must not come before guards that ask for it.
            self._token(("nested tensor",) if value.is_nested else ("tensor",), path)
            self.tensors.append(value)
            self.tensor_paths.append(path)
        elif kind in PLAIN:
            self._token((kind, value), path)
        elif kind is float:
            self._token((kind, value.hex()), path)
        elif is_a(value, (enum.Enum, np.dtype)):
            self._token((kind, value), path)
        elif is_a(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            if is_a(value, np.ndarray):
                self.arrays.append(value)
            self._token((kind, value.dtype.str, np.shape(value), value.tobytes()), path)
        else:
            self._add_shared(value, kind, path)

    def _add_shared(self, value: Any, kind: type, path: str) -> None:
        before = self._seen.get(id(value))
        if before is not None:
            self._token(("same", before), path)
            return
        if len(self.tokens) > _LIMIT:
            raise CaptureError(
                f"expected at most {_LIMIT} values in the arguments, got more at {path}",
                hint="pass the tensors that the program needs, not the objects around them",
            )
        self._seen[id(value)] = len(self._seen)
        if is_a(value, torch.nn.Module):
            self.modules.append((path, value))
        content = None if is_a(value, _BY_IDENTITY) else content_of(value)
        if content is None:
            self.alive.append(value)
            self._token((kind, id(value)), path)
            return
        if kind not in (tuple, frozenset):
            self.containers.append(value)
            self.container_paths.append(path)
        self._token((kind, content.label), path)
        for step, child in content.children():
            self.add(child, path + step)

    def _token(self, token: Any, path: str) -> None:
        self.tokens.append(token)
        self.paths.append(path)


Build = Callable[[list[Any], dict[int, Any]], Any]


class Blueprint:
    """How to build a nested value again, with other tensors in the places of those it holds.

    Args:
        value: The value to be built again.
        place: Says which of the new tensors stands for a tensor (or proxy) of `value`.
        existing: `{id: number}` of containers that are handed in at each call and not built anew.
        path: How messages call the value.
        kept: `{id: object}` of objects that outlive calls and are referred to as they are. When
            given, functions and modules that are not among them can't be built again.
    """

    def __init__(
        self,
        value: Any,
        place: Callable[[Any, str], int],
        existing: dict[int, int],
        path: str = "",
        kept: dict[int, Any] | None = None,
    ) -> None:
        self._place = place
        self._kept = kept
        self._existing = existing
        self._builders: dict[int, Build] = {}
        self._path = path
        self._build = self._plan(value, path)
        self._fill: Callable[[Any, list[Any]], None] | None = None
        self._children: list[Build] = []
        self._forget()

    def build(self, tensors: list[Any], containers: list[Any], memo: dict[int, Any]) -> Any:
        """Build the value.

        Args:
            tensors: The new tensors, by the numbers that `place` gave.
            containers: This call's containers, by the numbers in `existing`.
            memo: What was built so far in this call; one dict for all blueprints of a call.
        """
        memo.setdefault(-1, containers)
        return self._build(tensors, memo)

    def refill(
        self, target: Any, tensors: list[Any], containers: list[Any], memo: dict[int, Any]
    ) -> None:
        """Give `target` the content that the described container has."""
        memo.setdefault(-1, containers)
        if self._fill is not None:
            self._fill(target, [build(tensors, memo) for build in self._children])

    @classmethod
    def of_content(
        cls,
        value: Any,
        place: Callable[[Any, str], int],
        existing: dict[int, int],
        path: str,
        kept: dict[int, Any] | None = None,
    ) -> Blueprint:
        """Describe what is inside a container that itself stays the same."""
        plan = cls(None, place, existing, path)
        plan._place, plan._existing, plan._kept = place, existing, kept
        content = content_of(value)
        if content is None or content.fill is None:
            raise _opaque(value, path)
        plan._fill = content.fill
        plan._children = [plan._plan(child, path + step) for step, child in content.children()]
        plan._forget()
        return plan

    def _forget(self) -> None:
        """Drop what was needed for planning only, and would keep the first call's tensors alive."""
        self._place, self._existing, self._builders, self._kept = _no_place, {}, {}, None

    def _plan(self, value: Any, path: str) -> Build:
        if is_a(value, (torch.Tensor, fx.Proxy)) or type(value) in SYMBOLIC:
            number = self._place(value, path)
            return lambda tensors, _: tensors[number]
        if type(value) in (torch.Size, slice) and has_symbolic(value):
            return self._plan_sizes(value, path)
        if id(value) in self._existing:
            which = self._existing[id(value)]
            return lambda _, memo: memo[-1][which]
        if self._kept is not None and id(value) in self._kept:
            return lambda tensors, memo: value
        if type(value) in PLAIN or is_a(value, (float, enum.Enum, *_BY_IDENTITY)):
            if self._kept is not None and is_a(value, _MADE_BY_CALLS):
                raise _opaque(value, path)
            return lambda tensors, memo: value
        if is_a(value, np.generic):
            return lambda tensors, memo: value
        known = self._builders.get(id(value))
        return known if known is not None else self._plan_container(value, path)

    def _plan_sizes(self, value: Any, path: str) -> Build:
        """Plan a value of plain type, some of whose numbers are computed of sizes."""
        kind = type(value)
        items = (value.start, value.stop, value.step) if kind is slice else tuple(value)
        parts = [self._plan(item, path) for item in items]
        if kind is slice:
            return lambda tensors, memo: slice(*(part(tensors, memo) for part in parts))
        return lambda tensors, memo: torch.Size([part(tensors, memo) for part in parts])

    def _plan_container(self, value: Any, path: str) -> Build:
        content = content_of(value) or content_of_dict_of_a_class(value, type(value))
        if content is None:
            raise _opaque(value, path)
        key = id(value)
        children: list[Build] = []
        make, fill, build = content.make, content.fill, content.build

        def rebuild(tensors: list[Any], memo: dict[int, Any]) -> Any:
            if key in memo:
                return memo[key]
            if make is None or fill is None:
                assert build is not None
                result = build([child(tensors, memo) for child in children])
                memo[key] = result
                return result
            memo[key] = result = make()
            fill(result, [child(tensors, memo) for child in children])
            return result

        self._builders[key] = rebuild
        children += [self._plan(child, path + step) for step, child in content.children()]
        return rebuild


def _no_place(tensor: Any, path: str) -> int:
    raise LookupError(path)


def _opaque(value: Any, path: str) -> CaptureError:
    return CaptureError(
        f"expected tensors and plain values in {path}, got {type(value).__qualname__}, "
        "which can't be built again for each call",
        hint="return the tensors themselves, in tuples, lists, dicts or dataclasses",
    )
