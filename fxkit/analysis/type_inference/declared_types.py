"""Types that the author of an opaque function declares, for where it can't run without numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_RULES: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()


def declare_type(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Declare what a function returns, so that types go through calls of it without running it.

    Args:
        function: The function that graphs call.

    Returns:
        A decorator for the rule: it takes what the function takes, with a `TensorType` for each
        tensor, and returns a `TensorType`, a Python value, or a tuple, list or dict of them.

    Example:
        >>> import dataclasses, torch, fxkit
        >>> def every_other(x):
        ...     return torch.from_numpy(x.numpy()[::2].copy())
        >>> @fxkit.declare_type(every_other)
        ... def _(x):
        ...     shape = ((x.shape[0] + 1) // 2, *x.shape[1:])
        ...     return dataclasses.replace(x, shape=shape)
        >>> graph = torch.fx.Graph()
        >>> _ = graph.output(graph.call_function(every_other, (graph.placeholder("x"),)))
        >>> gm = torch.fx.GraphModule(torch.nn.Module(), graph)
        >>> print(fxkit.propagate_types(gm, (torch.randn(5, 3),)))
        f32[3,3]
    """

    def declare(rule: Callable[..., Any]) -> Callable[..., Any]:
        _RULES[function] = rule
        return rule

    return declare


def declared_type(function: Any) -> Callable[..., Any] | None:
    """Return the rule that was declared for a function, or None."""
    try:
        return _RULES.get(function)
    except TypeError:
        return None
