"""Calls of custom autograd functions: the code whose frame holds the class and what it is given.

Up to torch 2.13 `torch.autograd.Function.apply` is a method written in Python. In torch 2.14 it is
written in C and has no frame, so while somebody looks a method in Python stands before it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import BuiltinMethodType, CodeType
from typing import Any

from torch.autograd.function import Function

_lock = threading.Lock()
_users = 0
_original: Any = Function.__dict__.get("apply")


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return _original.__get__(None, cls)(*args, **kwargs)


_code_of_torch: CodeType | None = getattr(getattr(_original, "__func__", None), "__code__", None)
_can_stand_before = _code_of_torch is None and hasattr(_original, "__get__")

APPLY: CodeType = _code_of_torch or _apply.__code__
"""The code of `Function.apply`: its frame has the locals `cls`, `args` and `kwargs`."""


@contextlib.contextmanager
def frames_of_apply() -> Iterator[None]:
    """Let calls of `Function.apply` have frames; where they have, nothing is done."""
    global _users
    if not _can_stand_before:
        yield
        return
    with _lock:
        _users += 1
        if _users == 1:
            Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                Function.apply = _original


def direct_apply(function: type[Function]) -> Any:
    """Return `apply` of a class, without what it does in Python for transforms of functions.

    It is for calls of plain tensors, on which no transform is.
    """
    return getattr(super(Function, function), "apply", function.apply)


def is_without_frame(function: Any) -> bool:
    """Tell whether something is a bound `Function.apply` that was looked up before the frames."""
    if not _can_stand_before or not isinstance(function, BuiltinMethodType):
        return False
    owner = function.__self__
    return function.__name__ == "apply" and isinstance(owner, type) and issubclass(owner, Function)


def with_frame(function: Any) -> Any:
    """Return `Function.apply` of the same class, with a frame, in place of one without."""
    return function.__self__.apply if is_without_frame(function) else function


def forwards_without_frame() -> frozenset[CodeType]:
    """Return the code of the `forward` of every class there is, where `apply` may have no frame."""
    if not _can_stand_before:
        return frozenset()
    codes = {getattr(kind.forward, "__code__", None) for kind in _subclasses(Function)}
    return frozenset(code for code in codes if code is not None)


def _subclasses(kind: type) -> Iterator[Any]:
    for found in kind.__subclasses__():
        yield found
        yield from _subclasses(found)
