"""Flatten nested Python values into tensors and a structure, and rebuild them.

torch's own pytree stops at objects that nobody registered, and it forgets which containers are the
same. A captured call needs both: a key-value cache is an ordinary object that holds tensors, and a
list that was passed in has to be the list that was changed.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from fxkit.errors import CaptureError
from fxkit.torch_adapters import pytree
from fxkit.tracing.values.stored import (
    attributes_of,
    hides_attributes,
    in_classes,
    in_slot,
    is_a,
    is_comparable,
    is_made_plainly,
    slots_of,
)
from fxkit.tracing.values.symbolic_scalars import SYMBOLIC, has_symbolic, plain

_LIMIT = 20_000

_PLAIN = frozenset(
    {
        *(type(None), bool, int, str, bytes, complex, type(...), range, slice, type, torch.dtype),
        *(torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
    }
)
_BY_IDENTITY = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type),
    *(torch.nn.Module, torch.Generator),
)

_EMPTY = object()
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
        elif kind in _PLAIN:
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


@dataclass(slots=True)
class Content:
    """What is inside one container.

    Attributes:
        label: What has to be equal for two containers of one type to hold the same places.
        values: What is inside, in order.
        steps: How each place is written behind the path of the container.
        make: Builds an empty container of this kind; None where it needs its values.
        fill: Puts values into a container, replacing what it held; None where it can't be changed.
        build: Builds the container from its values, where it can't be changed afterwards.
    """

    label: Any
    values: list[Any]
    steps: list[str]
    make: Callable[[], Any] | None = None
    fill: Callable[[Any, list[Any]], None] | None = None
    build: Callable[[list[Any]], Any] | None = None

    def children(self) -> Iterator[tuple[str, Any]]:
        """Iterate over `(step, value)`."""
        return zip(self.steps, self.values, strict=True)


def content_of(value: Any) -> Content | None:
    """Look into a container; None for a value that is not one, or can't be looked into."""
    kind = type(value)
    if kind is list:
        return _list_content(value)
    if kind is tuple:
        return Content(len(value), list(value), _indices(len(value)), build=tuple)
    if kind in (dict, OrderedDict):
        return _dict_content(value, kind, kind)
    if kind is defaultdict:
        factory = value.default_factory
        return _dict_content(value, factory, lambda: defaultdict(factory))
    if kind in (set, frozenset):
        return _set_content(value, kind)
    if issubclass(kind, tuple) and (fields := in_classes(kind, "_fields")) is not None:
        steps = [f".{name}" for name in fields]
        return Content(len(value), list(value), steps, build=lambda values: kind(*values))
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        return _registered_content(value, node)
    return _object_content(value, kind)


def _indices(count: int) -> list[str]:
    return [f"[{index}]" for index in range(count)]


def _list_content(value: list[Any]) -> Content:
    def fill(target: list[Any], values: list[Any]) -> None:
        target[:] = values

    return Content(len(value), list(value), _indices(len(value)), list, fill)


def _dict_content(value: dict[Any, Any], label: Any, make: Callable[[], Any]) -> Content | None:
    keys = tuple([plain(key) for key in value])
    if not all(isinstance(key, (str, int, bool, type(None), enum.Enum, type)) for key in keys):
        return None

    def fill(target: dict[Any, Any], values: list[Any]) -> None:
        target.clear()
        target.update(zip(keys, values, strict=True))

    steps = [f"[{key!r}]" for key in keys]
    return Content((label, keys), list(value.values()), steps, make, fill)


def _set_content(value: Any, kind: type) -> Content | None:
    if any(type(item) not in _PLAIN for item in value):
        return None
    items = frozenset(value)

    def fill(target: set[Any], _: list[Any]) -> None:
        target.clear()
        target.update(items)

    if kind is frozenset:
        return Content(items, [], [], build=lambda _: items)
    return Content(items, [], [], set, fill)


def _registered_content(value: Any, node: Any) -> Content:
    values, context = node.flatten_fn(value)
    if isinstance(value, dict) and len(value) == len(values):
        steps = [f"[{key!r}]" for key in value]
    else:
        steps = _indices(len(values))
    keys = tuple(value) if isinstance(value, dict) else ()

    def build(new: list[Any]) -> Any:
        built = node.unflatten_fn(new, context)
        if keys and tuple(built) != keys and set(built) == set(keys):
            for key in keys:  # made of its keys in the order of its fields
                built.move_to_end(key)
        return built

    return Content((len(values), _comparable(context)), list(values), steps, build=build)


def _comparable(context: Any) -> Any:
    if isinstance(context, (list, tuple)):
        return tuple(_comparable(item) for item in context)
    return context


def _object_content(value: Any, kind: type) -> Content | None:
    """Look into an ordinary object; None for one that C code or a `__new__` of its own made."""
    if not is_made_plainly(kind) or hides_attributes(kind):
        return None
    attributes, slots = attributes_of(value), slots_of(kind)
    if attributes is None and not slots:
        return None
    contents = {name: in_slot(value, slot, _EMPTY) for name, slot in slots.items()}
    filled = [name for name, item in contents.items() if item is not _EMPTY]
    names = (*filled, *dict.keys(attributes or {}))

    def fill(target: Any, values: list[Any]) -> None:
        for name, slot in slots.items():
            if name not in filled and in_slot(target, slot, _EMPTY) is not _EMPTY:
                slot.__delete__(target)
        for name, item in zip(filled, values, strict=False):
            slots[name].__set__(target, item)
        if attributes is not None:
            table = attributes_of(target)
            assert table is not None  # it is of the class of one that has them
            dict.clear(table)
            dict.update(table, zip(names[len(filled) :], values[len(filled) :], strict=True))

    values = [contents[name] for name in filled]
    values += [] if attributes is None else dict.values(attributes)
    return Content(
        names, values, [f".{name}" for name in names], lambda: object.__new__(kind), fill
    )


def _content_of_dict_of_a_class(value: Any, kind: type) -> Content | None:
    """Look into a result that is of a subclass of `dict`, with what it has as attributes.

    Arguments of such classes are told by identity, and what they hold is guarded as state.
    """
    base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
    is_made_by_base = in_classes(kind, "__new__") is in_classes(base, "__new__")
    if not issubclass(kind, dict) or not is_made_by_base or slots_of(kind):
        return None
    items = {key: dict.__getitem__(value, key) for key in base.__iter__(value)}
    table, attributes = _dict_content(items, kind, dict), attributes_of(value)
    if table is None or attributes is None or issubclass(kind, defaultdict):
        return None
    keys, names = table.label[1], tuple(dict.keys(attributes))

    def fill(target: Any, values: list[Any]) -> None:
        for key, item in zip(keys, values, strict=False):
            base.__setitem__(target, key, item)
        held = attributes_of(target)
        assert held is not None  # it is of the class of one that has them
        dict.update(held, zip(names, values[len(keys) :], strict=True))

    return Content(
        (kind, keys, names),
        [*table.values, *dict.values(attributes)],
        [*table.steps, *(f".{name}" for name in names)],
        lambda: base.__new__(kind),
        fill,
    )


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
        if type(value) in _PLAIN or is_a(value, (float, enum.Enum, *_BY_IDENTITY)):
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
        content = content_of(value) or _content_of_dict_of_a_class(value, type(value))
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
