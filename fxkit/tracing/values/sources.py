"""Sources of outside tensors: parameters, buffers, globals, closures.

They are found before the program runs, by looking into what the callable refers to. Each has a
place, so that a later call can tell whether the same tensor still lies there. A tensor that turns
up during the run and was neither recorded nor found here has no known origin, and is refused.
"""

from __future__ import annotations

import functools
import keyword
import logging
import operator
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

_STANDARD = frozenset(torch.nn.Module().__dict__)
_PLAIN = frozenset(
    (bool, int, float, str, bytes, type(None), complex, type, torch.dtype, torch.device)
)
_MAX_DEPTH = 5
_MAX_ITEMS = 10_000

_GOOD_NAME = re.compile(r"\w+(\.\w+)*")

_MISSING = object()


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Where a tensor lies: a key of a dict, an index of a list, or the content of a closure's cell.

    Attributes:
        holder: The dict, list, tuple or cell.
        key: The key or index; None for a cell.
        name: The place as the user would write it.
    """

    holder: Any
    key: Any
    name: str

    def read(self) -> Any:
        """Return what lies there now, or a marker that equals nothing else."""
        if self.key is None:
            return self.holder.cell_contents
        try:
            return self.holder[self.key]
        except (KeyError, IndexError):
            return _MISSING


class Origins(Protocol):
    """Where tensors and modules from outside of the arguments lie.

    Attributes:
        places: The places of each tensor, by `id` of the tensor; the first one names it.
        modules: The path of each module, by `id` of the module.
        found: `(path, module)` of all modules, in the order in which they were found.
    """

    places: dict[int, tuple[torch.Tensor, list[ValueSource]]]
    modules: dict[int, str]
    found: list[tuple[str, torch.nn.Module]]


@dataclass(slots=True)
class Surroundings:
    """What a callable refers to, tensors and modules above all; see `Origins`.

    Attributes:
        holders: `(path, dict or list)` of containers and of attributes of objects.
        bindings: Globals and closures that functions of the program read, and what they hold.
    """

    places: dict[int, tuple[torch.Tensor, list[ValueSource]]] = field(default_factory=dict)
    modules: dict[int, str] = field(default_factory=dict)
    found: list[tuple[str, torch.nn.Module]] = field(default_factory=list)
    holders: list[tuple[str, Any]] = field(default_factory=list)
    bindings: list[tuple[ValueSource, Any]] = field(default_factory=list)
    _package: str | None = None
    _seen: set[int] = field(default_factory=set)
    _keep: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, fn: Any, modules: list[tuple[str, torch.nn.Module]]) -> Surroundings:
        """Look into `fn`, and into modules that are among its arguments."""
        found = cls()
        if isinstance(fn, types.FunctionType):
            found._package = _package(fn)
        found._look_into_callable(fn)
        for name, module in modules:
            found._look_into_module(module, name)
        return found

    def _look_into_callable(self, fn: Any) -> None:
        if isinstance(fn, torch.nn.Module):
            self._look_into_module(fn, "")
        elif isinstance(fn, functools.partial):
            self._look_into_callable(fn.func)
            self._look_into(fn.args, "args", 0)
            self._look_into(fn.keywords, "keywords", 0)
        elif isinstance(fn, types.MethodType):
            self._look_into_callable(fn.__self__)
            self._look_into_function(fn.__func__, 0)
        elif isinstance(fn, types.FunctionType):
            self._look_into_function(fn, 0)
        elif hasattr(fn, "__dict__") and not isinstance(fn, type):
            self.holders.append(("", vars(fn)))
            for name, value in vars(fn).items():
                self._look_at(ValueSource(vars(fn), name, name), value, name, 0)
            self._look_into_function(type(fn).__call__, 0)

    def _look_into_function(self, fn: Any, depth: int) -> None:
        fn = getattr(fn, "__wrapped__", fn) if not isinstance(fn, types.FunctionType) else fn
        if not isinstance(fn, types.FunctionType) or not self._is_new(fn) or _is_torch(fn):
            return
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            value = _cell_value(cell)
            if value is not _MISSING:
                self._look_at_binding(ValueSource(cell, None, name), value, depth)
        for index, value in enumerate(fn.__defaults__ or ()):
            self._look_at(ValueSource(fn.__defaults__, index, f"default_{index}"), value, "", depth)
        for name, value in (fn.__kwdefaults__ or {}).items():
            self._look_at(ValueSource(fn.__kwdefaults__, name, name), value, name, depth)
        for name in _names_read(fn.__code__):
            value = fn.__globals__.get(name, _MISSING)
            if value is not _MISSING:
                self._look_at_binding(ValueSource(fn.__globals__, name, name), value, depth)

    def _look_into_module(self, module: torch.nn.Module, path: str) -> None:
        if id(module) in self.modules or isinstance(module, torch.jit.ScriptModule):
            return
        self.modules[id(module)] = path
        self.found.append((path, module))
        dot = f"{path}." if path else ""
        attributes = module.__dict__
        self.holders.append((path, attributes))
        for table in ("_parameters", "_buffers"):
            if attributes[table]:
                self.holders.append((path, attributes[table]))
            for name, value in attributes[table].items():
                if value is not None:
                    self._found(value, ValueSource(attributes[table], name, dot + name))
        for name, child in attributes["_modules"].items():
            if child is not None:
                self._look_into_module(child, dot + name)
        if len(attributes) > len(_STANDARD):
            for name, value in attributes.items():
                if name not in _STANDARD and type(value) not in _PLAIN:
                    self._look_at(ValueSource(attributes, name, dot + name), value, dot + name, 1)
        if not _is_torch(type(module)) and self._is_new(type(module)):
            self._look_into_function(type(module).forward, 1)

    def _look_at_binding(self, place: ValueSource, value: Any, depth: int) -> None:
        self.bindings.append((place, value))
        self._look_at(place, value, place.name, depth)

    def _look_at(self, place: ValueSource, value: Any, path: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._found(value, place)
        else:
            self._look_into(value, path, depth)

    def _look_into(self, value: Any, path: str, depth: int) -> None:
        if type(value) in _PLAIN or isinstance(value, logging.Logger):
            return  # a logger leads to all others, and none keeps tensors
        if isinstance(value, torch.nn.Module):
            self._look_into_module(value, path)
        elif isinstance(value, types.FunctionType):
            if depth < _MAX_DEPTH and _package(value) == self._package:
                self._look_into_function(value, depth + 1)
        elif isinstance(value, types.MethodType):
            self._look_into(value.__self__, path, depth)
        elif depth < _MAX_DEPTH and len(self._seen) < _MAX_ITEMS and self._is_new(value):
            holder = vars(value) if _is_object(value) else value
            if isinstance(holder, (dict, list)):
                self.holders.append((path, holder))
            for key, child, step in _items(value):
                if type(child) not in _PLAIN:
                    self._look_at(
                        ValueSource(holder, key, path + step), child, path + step, depth + 1
                    )

    def _found(self, tensor: torch.Tensor, place: ValueSource) -> None:
        self.places.setdefault(id(tensor), (tensor, []))[1].append(place)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._keep.append(value)
        return True


class Contents:
    """What the environment of a program hold, to see afterwards whether the program changed it."""

    def __init__(self, environment: Surroundings) -> None:
        self._bindings = environment.bindings
        self._holders = [
            (path, holder, _keys(holder), _values(holder)) for path, holder in environment.holders
        ]

    def change(self) -> str | None:
        """Return the name of something that was changed; None when all is as it was."""
        for place, value in self._bindings:
            if place.read() is not value:
                return place.name
        for path, holder, keys, values in self._holders:
            now = _values(holder)
            if len(now) != len(values) or not all(map(operator.is_, now, values)):
                return _changed_name(path, holder, keys, values)
        return None


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else []


def _values(holder: Any) -> list[Any]:
    return list(holder.values()) if isinstance(holder, dict) else list(holder)


def _changed_name(path: str, holder: Any, keys: list[Any], values: list[Any]) -> str:
    if not isinstance(holder, dict):
        return path or "a list"
    before = dict(zip(keys, values, strict=True))
    changed = [key for key, value in holder.items() if before.get(key, _MISSING) is not value]
    changed += [key for key in before if key not in holder]
    return f"{path}.{changed[0]}".lstrip(".") if changed else path


def attribute_name(place: ValueSource, taken: set[str]) -> str:
    """Turn a place into the name of an attribute of a graph module.

    Args:
        place: The place; its name is kept as it is where that is possible.
        taken: The names that are taken, and with a dot behind them those of submodules; added to.
    """
    name = place.name
    if not _GOOD_NAME.fullmatch(name):
        name = ".".join(re.sub(r"\W+", "_", atom).strip("_") or "_" for atom in name.split("."))
    if _is_reserved(name.partition(".")[0]):
        name = f"outer_{name}"
    first, *inner = name.split(".")
    name = ".".join([first, *(f"outer_{atom}" if _is_of_module(atom) else atom for atom in inner)])
    base = name
    first, _, rest = base.partition(".")
    number = 0
    while name in taken or f"{name}." in taken or not taken.isdisjoint(_prefixes(name)):
        number += 1  # on the first part, since it may be a prefix that is taken
        name = f"{first}_{number}.{rest}" if rest else f"{first}_{number}"
    taken.add(name)
    taken.update(f"{prefix}." for prefix in _prefixes(name))
    return name


@functools.cache
def _is_reserved(name: str) -> bool:
    known = hasattr(fx.GraphModule, name) or name in _STANDARD
    return known or keyword.iskeyword(name)


@functools.cache
def _is_of_module(name: str) -> bool:
    """Tell whether no tensor can take this name: modules have it already, or Python."""
    return hasattr(torch.nn.Module(), name) or keyword.iskeyword(name)


def _prefixes(name: str) -> list[str]:
    """Return `a` and `a.b` for `a.b.c`."""
    atoms = name.split(".")
    return [".".join(atoms[:depth]) for depth in range(1, len(atoms))]


def _cell_value(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _names_read(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_read(constant)


def _items(value: Any) -> list[tuple[Any, Any, str]]:
    if isinstance(value, dict):
        return [(key, child, f".{key}") for key, child in list(value.items())]
    if isinstance(value, (list, tuple)):
        return [(index, child, f".{index}") for index, child in enumerate(value)]
    if _is_object(value):
        return [(name, child, f".{name}") for name, child in list(vars(value).items())]
    return []


def _is_object(value: Any) -> bool:
    return (
        not isinstance(value, (dict, list, tuple, type, types.ModuleType))
        and isinstance(getattr(value, "__dict__", None), dict)
        and not _is_torch(type(value))
    )


def _is_torch(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module == "torch" or module.startswith("torch.")


def _package(fn: types.FunctionType) -> str:
    return (fn.__module__ or "").partition(".")[0]
