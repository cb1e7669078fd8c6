"""Activation checkpoints without reentrant backward, and what torch runs around them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from fxkit.torch_adapters.private_names import private

_MODULE = "torch.utils.checkpoint"
_NAME = "_checkpoint_without_reentrant_generator"
_PLAIN_CONTEXT = "noop_context_fn"
_AROUND = private(
    f"{_MODULE}.{_NAME}",
    "capturing programs that checkpoint activations",
    "such a program runs in Python",
)


def plain_checkpoints(
    is_plain: Callable[[], bool],
) -> tuple[Any, str, Callable[..., Iterator[None]]] | None:
    """Return module, name and value of what lets a checkpoint be a plain call of its function.

    One with contexts of its own, as for selective checkpoints, stays as it is.

    Args:
        is_plain: Asked at each checkpoint.

    Returns:
        What is to be put in place; None where nobody can use checkpoints, as they are not imported.
    """
    module = sys.modules.get(_MODULE)
    around: Callable[..., Iterator[None]] | None = None if module is None else _AROUND.get()
    if module is None or around is None:
        return None
    usual = getattr(module, _PLAIN_CONTEXT, None)

    def plain(
        function: Any, preserve: Any = True, context: Any = usual, *rest: Any, **kwargs: Any
    ) -> Iterator[None]:
        if context is usual and is_plain():
            return _twice()
        return around(function, preserve, context, *rest, **kwargs)

    return module, _NAME, plain


def _twice() -> Iterator[None]:
    """Stop once, between what would run before the function and what would run after it."""
    yield


def is_wrapper_of_checkpoints(code: Any) -> bool:
    """Tell whether code is that which imports TorchDynamo before a checkpoint."""
    module = sys.modules.get(_MODULE)
    return module is not None and code is module.checkpoint.__code__
