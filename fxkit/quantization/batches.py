"""Batches of inputs: for each call a tuple of positional inputs, or a dict of keyword inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fxkit.errors import FxkitError, UnsupportedError
from fxkit.ir.types import TensorType

Batch = tuple[Any, ...] | list[Any] | Mapping[str, Any]


def arguments_of(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword inputs.

    Raises:
        UnsupportedError: When it is neither a tuple nor a dict.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not isinstance(batch, (tuple, list)):
        raise UnsupportedError(
            f"expected batches of a tuple or dict each, got a {type(batch).__name__}",
            hint="put the inputs of a call into a tuple: (tensor,)",
        )
    return tuple(batch), {}


def checked_batches(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Return batches as they are.

    Raises:
        UnsupportedError: When they can't be looked through.
    """
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise UnsupportedError(
            f"expected batches, got {type(batches).__name__}",
            hint="give a list of tuples, or a DataLoader: one tuple for each call",
        )
    return batches


def call_with(program: Callable[..., Any], batch: Batch) -> Any:
    """Call a program with a batch.

    Raises:
        UnsupportedError: When it is neither a tuple nor a dict, or the program can't take it.
    """
    args, kwargs = arguments_of(batch)
    with told_where_it_does_not_fit(args, kwargs):
        return program(*args, **kwargs)


@contextlib.contextmanager
def told_where_it_does_not_fit(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Say what a program was given where it can't take that.

    Raises:
        UnsupportedError: When the program raises, but for fxkit's own errors.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        if isinstance(error, FxkitError):
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        raise UnsupportedError(
            f"expected a batch that the program takes, got {_told(args, kwargs)}: {lines[0]}",
            hint="each batch is what a call of the model takes, without labels: a tuple, or a dict "
            "by name",
        ) from error


def _told(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return what a batch holds, as text."""
    given = [_kind(value) for value in args]
    given += [f"{name}={_kind(value)}" for name, value in kwargs.items()]
    return f"({', '.join(given)})"


def _kind(value: Any) -> str:
    return str(TensorType.of(value)) if isinstance(value, torch.Tensor) else type(value).__name__


def inputs_to_capture(
    batches: Iterable[Batch], args: tuple[Any, ...] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is captured with: `args`, else the first batch, else nothing."""
    if args is not None:
        return args, {}
    return next(map(arguments_of, batches), ((), {}))
