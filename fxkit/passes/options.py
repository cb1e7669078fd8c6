"""Options of passes, held against what their classes say that they take."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import numbers
import types
import typing
from collections.abc import Collection
from typing import Any

import torch

from fxkit.errors import UnsupportedError

_MOST_SHOWN = 8


def check_types(options: Any) -> None:
    """Refuse an option of another type than its field is annotated with.

    Args:
        options: An instance of a dataclass.

    Raises:
        UnsupportedError: When there is one.
    """
    hints = _hints(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if not _fits(value, hints.get(field.name, Any)):
            raise _refused(options, field.name, f"of type {_named(hints[field.name])}", value)


def check_at_least(options: Any, name: str, least: float) -> None:
    """Refuse an option that is a number below the least that makes sense; None is as it is.

    Raises:
        UnsupportedError: When it is.
    """
    value = getattr(options, name)
    if value is not None and value < least:
        raise _refused(options, name, f"at least {least}", value)


def check_among(options: Any, name: str, known: Collection[Any]) -> None:
    """Refuse an option, or a part of one that is a tuple, that is none of those that there are.

    Raises:
        UnsupportedError: When it is.
    """
    value = getattr(options, name)
    for part in value if isinstance(value, tuple) else (value,):
        if part not in known:
            words = list(map(str, known))
            near = difflib.get_close_matches(str(part), words, n=3, cutoff=0.5)
            shown = words if len(words) <= _MOST_SHOWN else [*(near or words[:3]), "..."]
            raise _refused(options, name, f"among {', '.join(shown)}", part)


def check_lower_precision(options: Any, name: str = "dtype") -> None:
    """Refuse a dtype that is no lower precision to compute in.

    Raises:
        UnsupportedError: When it is none.
    """
    check_among(options, name, (torch.bfloat16, torch.float16))


def _refused(options: Any, name: str, wanted: str, value: Any) -> UnsupportedError:
    return UnsupportedError(
        f"expected the option {name} of {type(options).__name__} to be {wanted}, got {value!r}",
        hint=f"its options are {', '.join(field.name for field in dataclasses.fields(options))}",
    )


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError:  # a name that only type checkers know
        return {}


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        items = parts[:1] if parts[1:] == (...,) else ()
        return isinstance(value, tuple) and all(_fits(v, items[0]) for v in value if items)
    if origin is collections.abc.Callable:
        return callable(value)
    if hint is bool:
        return isinstance(value, bool)
    if hint is int or hint is float:
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if not isinstance(hint, type) or hint is Any or origin is not None:
        return True
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    return isinstance(value, hint)


def _named(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
