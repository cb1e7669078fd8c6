"""Batches of inputs: for each call a tuple of positional inputs, or a dict of keyword inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fxkit.errors import UnsupportedError

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


def call_with(program: Callable[..., Any], batch: Batch) -> Any:
    """Call a program with a batch."""
    args, kwargs = arguments_of(batch)
    return program(*args, **kwargs)


def inputs_to_capture(
    batches: Iterable[Batch], args: tuple[Any, ...] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is captured with: `args`, else the first batch, else nothing."""
    if args is not None:
        return args, {}
    return next(map(arguments_of, batches), ((), {}))
