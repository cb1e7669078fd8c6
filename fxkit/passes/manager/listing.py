"""Passes and pipelines as text, and text as passes: what the command line needs of them."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from fxkit.errors import FxkitError, PassError
from fxkit.ir.text_table import aligned
from fxkit.passes.base import Pass
from fxkit.passes.properties import PROPERTIES


def describe_passes(passes: Iterable[tuple[str, type[Pass]]]) -> str:
    """Return each pass with its summary, contract and options, as text.

    Args:
        passes: Names and classes, as `PASSES.items()` gives them.
    """
    parts = []
    for name, cls in passes:
        rows = [(f"  {key}", value) for key, value in _contract(cls) if value]
        parts.append("\n".join([f"{name}: {_summary(cls)}", *aligned(rows)]))
    return "\n".join(parts)


def passes_page(
    passes: Iterable[tuple[str, type[Pass]]], pipelines: Iterable[tuple[str, tuple[Pass, ...]]]
) -> str:
    """Return the table of passes as the documentation prints it.

    Args:
        passes: Names and classes, as `PASSES.items()` gives them.
        pipelines: The named orders, as `PIPELINES.items()` gives them.
    """
    orders = [(name, {member.name for member in order}) for name, order in pipelines]
    lines = ["| pass | does | numerics | pipelines |", "|---|---|---|---|"]
    for name, cls in passes:
        users = ", ".join(order for order, members in orders if name in members)
        lines.append(f"| `{cls.__name__}` | {_summary(cls)} | {cls.numerics} | {users} |")
    return "\n".join(lines) + "\n"


def describe_properties() -> str:
    """Return the properties that passes can name, with what they mean, as text."""
    return "\n".join(aligned([(name, known.summary) for name, known in PROPERTIES.items()]))


def describe_pipelines(pipelines: Iterable[tuple[str, tuple[Pass, ...]]]) -> str:
    """Return the named orders of passes, as text."""
    return "\n".join(aligned([(name, ", ".join(map(str, order))) for name, order in pipelines]))


def _summary(cls: type[Pass]) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


def _contract(cls: type[Pass]) -> list[tuple[str, str]]:
    once = "idempotent" if cls.is_idempotent else "not idempotent"
    return [
        ("numerics", f"{cls.numerics}, {once}"),
        ("requires", ", ".join(cls.requires)),
        ("ensures", ", ".join(cls.ensures)),
        ("preserves", ", ".join(cls.preserves)),
        ("options", ", ".join(f"{f.name}={_default(f)}" for f in _options(cls))),
    ]


def _options(cls: type[Pass]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)  # type: ignore[arg-type]


def _default(option: dataclasses.Field[Any]) -> str:
    if option.default is not dataclasses.MISSING:
        return _shown(option.default)
    if option.default_factory is not dataclasses.MISSING:
        return _shown(option.default_factory())
    return "?"


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


def passes_of(
    text: str, passes: Any, pipelines: dict[str, tuple[Pass, ...]], settings: Iterable[str] = ()
) -> list[Pass]:
    """Return the passes that a text names, with the options that settings give them.

    Args:
        text: Names of passes and pipelines, with commas between them.
        passes: The registry of passes.
        pipelines: The named orders.
        settings: `pass.option=value`, the value as Python writes it; a dtype by its name.

    Raises:
        FxkitError: When there is no such pass or pipeline.
        PassError: When there is no such option, or no such pass among those that are to run, or the
            value is of another kind.
    """
    chosen = [p for name in text.split(",") for p in _named(name.strip(), passes, pipelines)]
    for setting in settings:
        target, has_value, value = setting.partition("=")
        name, has_option, option = target.partition(".")
        if not (has_value and has_option):
            raise PassError(
                f"expected pass.option=value, got {setting!r}",
                hint="for example constant_folding.max_bytes=1024",
            )
        places = [i for i, current in enumerate(chosen) if current.name == name]
        if not places:
            raise PassError(
                f"expected an option of a pass that runs, got one of {name!r}",
                hint=f"what runs is {', '.join(current.name for current in chosen)}",
            )
        for place in places:
            chosen[place] = _with(chosen[place], option, value)
    return chosen


def _named(name: str, passes: Any, pipelines: dict[str, tuple[Pass, ...]]) -> tuple[Pass, ...]:
    if name in pipelines:
        return pipelines[name]
    try:
        return (passes[name](),)
    except FxkitError as error:
        error.hint = f"{error.hint}; the named orders are: {', '.join(pipelines)}"
        raise


def _with(current: Pass, option: str, text: str) -> Pass:
    known = {f.name: f for f in _options(type(current))}
    if option not in known:
        raise PassError(
            f"expected an option of {current.name}, got {option!r}",
            hint=f"it has {', '.join(known)}" if known else "it has none",
        )
    value, now = _value(text), getattr(current, option)
    if not _is_alike(value, now):
        raise PassError(
            f"expected {current.name}.{option} to be like {now!r}, got {value!r}",
            hint="values are written as Python writes them: 1024, True, (1, 2), bfloat16",
        )
    return dataclasses.replace(current, **{option: value})  # type: ignore[type-var]


def _is_alike(value: Any, now: Any) -> bool:
    """Tell whether an option's new value is of the kind that it has; of None nothing is known."""
    if now is None or value is None:
        return True
    if isinstance(now, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(now, (tuple, list, frozenset, set)):
        return isinstance(value, (tuple, list, frozenset, set))
    plain = (bool, int, str, torch.dtype)
    return type(value) is type(now) if isinstance(now, plain) else True


def _value(text: str) -> Any:
    named = getattr(torch, text.removeprefix("torch."), None)
    if isinstance(named, torch.dtype):
        return named
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
