"""What the walk over a program's state leaves alone, and how it tells kinds of objects apart."""

from __future__ import annotations

import enum
import functools
import gc
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fxkit.tracing.guarding import holders as h
from fxkit.tracing.surroundings.trust import is_standard, is_trusted_class
from fxkit.tracing.values.structure import slot_names

LIMIT = 50_000
STANDS_FOR = "_fxkit_stands_for"
"""Attribute of a class: what holds the program that an object of it runs, its own state apart."""

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


def made_of(value: Any) -> list[Any] | None:
    """Return what a method, partial, property or memoised function calls; None for others.

    A compiled program is the program: what is kept of its graphs is no part of what it reads.
    """
    held = getattr(type(value), STANDS_FOR, None)
    if isinstance(held, str):
        return [getattr(value, held)]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, LRU):
        return [value.__wrapped__]
    if isinstance(value, types.MappingProxyType):
        return [part for part in gc.get_referents(value) if isinstance(part, dict)]
    return None


_IS_MUTABLE = 1 << 9  # a class that a statement has made, not one written in C


def has_parts(value: Any) -> bool:
    """Tell whether what a value consists of can be exchanged; see `guarding.parts`."""
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, (types.FunctionType, types.ModuleType)):
        return True
    return bool(kind.__flags__ & _IS_MUTABLE)


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
    return kind is types.SimpleNamespace or (is_standard(kind) and not is_trusted_class(kind))


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
    return [result for result in results if isinstance(result, (torch.Tensor, tuple, list))]


def keeps_to_itself(kind: type) -> bool:
    is_of_torch = kind.__module__.partition(".")[0] in ("torch", "numpy")
    return is_of_torch and not kind.__module__.startswith("torch.distributions")


def root_name(fn: Any) -> str:
    return "" if not isinstance(fn, types.FunctionType) else fn.__name__


def is_readable(stream: Any) -> bool:
    try:
        return stream.readable()
    except ValueError:  # it is closed
        return False


def assign(kind: type, name: str, value: Any) -> None:
    if value is h.ABSENT:
        delattr(kind, name)
    else:
        setattr(kind, name, value)


def slot_place(holder: h.SlotsHolder, name: str) -> Any:
    return holder.place(name).holder


@functools.lru_cache(maxsize=4096)
def guarded_slot_names(kind: type) -> tuple[str, ...]:
    """Return the slots of a class that have to be guarded; none of a class that is trusted."""
    if is_trusted_class(kind):
        return ()
    return slot_names(kind)


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
    kind = first if isinstance(first, type) else type(first)
    return kind, found + [vars(base).get(code.co_name) for base in kind.__mro__]


def function_with(code: types.CodeType, candidates: Iterable[Any]) -> list[types.FunctionType]:
    """Return a function with some code, if there is one among functions, methods, properties."""
    for found in candidates:
        for part in (found, *(getattr(found, name, None) for name in ("__func__", "fget"))):
            if isinstance(part, types.FunctionType) and part.__code__ is code:
                return [part]
    return []


def functions_of(codes: Iterable[types.CodeType]) -> list[types.FunctionType]:
    """Return the living functions that have one of these codes; looks at all objects there are."""
    referrers = gc.get_referrers(*codes) if codes else []
    return [value for value in referrers if isinstance(value, types.FunctionType)]
