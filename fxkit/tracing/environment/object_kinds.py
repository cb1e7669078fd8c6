"""How the environment walk classifies objects, and which it leaves alone."""

from __future__ import annotations

import enum
import functools
import gc
import types
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.values.allowlist import is_allowlisted_class, is_standard
from fxkit.tracing.values.stored import (
    Slot,
    class_attributes,
    in_classes,
    is_a,
    is_made_by_statement,
    module_of,
    mro_of,
    referent_of,
    slots_of,
)

LIMIT = 50_000
STANDS_FOR = "_fxkit_stands_for"
"""Attribute of a class: what holds the program that an object of it runs, its own state apart."""

DEFAULT_OF = "the default of "
"""How the path of a default begins; the name of its parameter follows."""

OPAQUE = "_fxkit_opaque"
"""Attribute of a function that calls another one unseen, and is not looked into."""

MODULE_STATE = frozenset(
    """
    training _parameters _buffers _modules _forward_hooks _forward_pre_hooks forward
    _forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks_with_kwargs
    _backward_hooks _backward_pre_hooks parametrizations
    """.split()
)
_OF_FUNCTIONS = frozenset("forward backward setup_context vjp jvp vmap generate_vmap_rule".split())
TABLES = tuple(
    name
    for name in torch.nn.Module().__dict__
    if isinstance(torch.nn.Module().__dict__[name], dict)
)
LEFT_ALONE = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType, types.FrameType),
    *(types.GenericAlias, types.SimpleNamespace().__init__.__class__, enum.Enum, torch.Generator),
    *(np.generic, np.dtype, np.ufunc, torch.jit.ScriptModule, torch.jit.ScriptFunction),
)
REVEALING = frozenset("__code__ __defaults__ __kwdefaults__ signature getfullargspec".split())
LRU = type(functools.lru_cache(maxsize=1)(lambda: None))


_MADE_OF: tuple[tuple[type, tuple[str, ...]], ...] = (
    (types.MethodType, ("__self__", "__func__")),
    (functools.partial, ("func", "args", "keywords")),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
    (property, ("fget", "fset", "fdel")),
)


def made_of(value: Any) -> list[Any] | None:
    """Return what a method, partial, property or memoised function calls; None for others.

    A compiled program is the program: what is kept of its graphs is no part of what it reads.
    """
    kind = type(value)
    held = in_classes(kind, STANDS_FOR)
    if isinstance(held, str):
        return [getattr(value, held)]
    for made, names in _MADE_OF:
        if issubclass(kind, made):
            return [vars(made)[name].__get__(value) for name in names]
    if issubclass(kind, LRU):
        return [value.__wrapped__]
    if kind is types.MappingProxyType:
        return gc.get_referents(value)
    return None


def factory_of(table: dict[Any, Any]) -> Any:
    """Return what makes the values that a `defaultdict` lacks; None for other dicts."""
    if not is_a(table, defaultdict):
        return None
    return vars(defaultdict)["default_factory"].__get__(table)


def defaults_of(fn: types.FunctionType) -> Iterator[tuple[Any, list[tuple[Any, str, Any]]]]:
    """Iterate over what holds defaults of a function, with `(key, parameter, default)` of each."""
    if fn.__defaults__:
        start = fn.__code__.co_argcount - len(fn.__defaults__)
        names = fn.__code__.co_varnames[start:]
        yield fn.__defaults__, [(i, names[i], value) for i, value in enumerate(fn.__defaults__)]
    if fn.__kwdefaults__:
        yield fn.__kwdefaults__, [(name, name, it) for name, it in fn.__kwdefaults__.items()]


def reference_of(proxy: Any) -> weakref.ref[Any] | None:
    """Return a weak reference to what a weak proxy stands for; None where that can't be told."""
    referent = referent_of(proxy)
    return None if referent is None else weakref.ref(referent)


def has_parts(value: Any) -> bool:
    """Tell whether what a value consists of can be exchanged; see `guarding.parts`."""
    kind = value if is_a(value, type) else type(value)
    return is_a(value, (types.FunctionType, types.ModuleType)) or is_made_by_statement(kind)


@functools.cache
def names_of_tensors() -> frozenset[str]:
    """Return the attributes that tensors have."""
    return frozenset(dir(torch.Tensor))


def read_by_bases(kind: type) -> frozenset[str]:
    """Return the attributes of a class that its bases read although no code of the program does."""
    if issubclass(kind, torch.nn.Module):
        return MODULE_STATE
    if issubclass(kind, enum.Enum):
        return frozenset({"_member_map_"})
    return _OF_FUNCTIONS if issubclass(kind, torch.autograd.Function) else frozenset()


def can_widen(holder: h.NamespaceHolder) -> bool:
    return holder.copied and not holder.is_sealed


def is_read_by_name(kind: type) -> bool:
    """Tell whether only code that is looked at reads the attributes of a standard class.

    The code of `collections.UserDict` is not looked at, and reads them all.
    """
    return kind is types.SimpleNamespace or (is_standard(kind) and not is_allowlisted_class(kind))


def is_sealed(kind: type) -> bool:
    """Tell whether attributes of a standard class are the business of that class alone."""
    return is_standard(kind) and kind is not types.SimpleNamespace


def global_hooks() -> tuple[list[tuple[Any, str]], list[tuple[str, Any]]]:
    """Return the tables of the hooks that torch runs for all modules, the empty ones apart."""
    home = torch.nn.modules.module
    names = [name for name in vars(home) if name.startswith("_global_") and "hook" in name]
    tables = [(f"torch.nn.modules.module.{name}", vars(home)[name]) for name in names]
    tables = [(path, table) for path, table in tables if isinstance(table, dict)]
    full = [(table, path) for path, table in tables if table]
    return full, [(path, table) for path, table in tables if not table]


def results_of(memo: Any) -> list[Any]:
    """Return what a memoised function keeps and may hold tensors."""
    results = gc.get_referents(memo)
    results += [item for part in results if type(part) is dict for item in part.values()]
    return [result for result in results if is_a(result, (torch.Tensor, tuple, list))]


def keeps_to_itself(kind: type) -> bool:
    module = module_of(kind)
    is_of_torch = module.partition(".")[0] in ("torch", "numpy")
    return is_of_torch and not module.startswith("torch.distributions")


def root_name(fn: Any) -> str:
    return fn.__name__ if type(fn) is types.FunctionType else ""


def is_readable(stream: Any) -> bool:
    try:
        return stream.readable()
    except ValueError:  # it is closed
        return False


def assign(kind: type, name: str, value: Any) -> None:
    # Not by the `__setattr__` of a metaclass, which has run when the program set it.
    if value is h.ABSENT:
        type.__delattr__(kind, name)
    else:
        type.__setattr__(kind, name, value)


def guarded_slots(kind: type) -> dict[str, Slot]:
    """Return the slots of a class that have to be guarded; none of a class that is trusted."""
    is_exception = issubclass(kind, BaseException)
    return {} if is_allowlisted_class(kind) and not is_exception else slots_of(kind)


def has_cells(fn: types.FunctionType, values: dict[str, Any]) -> bool:
    """Tell whether the closure of a function holds some values, by name."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)
    return all(h.content(cell) is values.get(name, h.ABSENT) for name, cell in cells)


def candidates(frame: types.FrameType) -> tuple[type | None, list[Any]]:
    """Return where the function of a frame may lie, and the class of its first argument."""
    code = frame.f_code
    found = [frame.f_globals.get(code.co_name)]
    if not code.co_argcount:
        return None, found
    first = frame.f_locals.get(code.co_varnames[0])
    kind = first if is_a(first, type) else type(first)
    return kind, found + [class_attributes(base).get(code.co_name) for base in mro_of(kind)]


def function_with(code: types.CodeType, candidates: Iterable[Any]) -> list[types.FunctionType]:
    """Return a function with some code, if there is one among functions, methods, properties."""
    for found in candidates:
        for part in (found, *(made_of(found) or ())):
            if type(part) is types.FunctionType and part.__code__ is code:
                return [part]
    return []
