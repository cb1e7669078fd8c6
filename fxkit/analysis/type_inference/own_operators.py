"""Operators of fxkit's own, which lowering puts into graphs: `torch.ops.fxkit.…`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from fxkit.analysis.type_inference.declared_types import declare_type

_lock = threading.Lock()
_made: dict[str, tuple[torch.library.Library, Any]] = {}


def define_operator(schema: str, function: Callable[..., Any], type_of: Callable[..., Any]) -> Any:
    """Return an operator, which is registered when it is first asked for.

    Args:
        schema: Its schema, without a namespace.
        function: Computes it by torch.
        type_of: Returns the type of its result from those of its operands.
    """
    name = schema.partition("(")[0]
    with _lock:
        if name not in _made:
            library = torch.library.Library("fxkit", "FRAGMENT")
            library.define(schema)
            library.impl(name, function, "CompositeImplicitAutograd")
            overload = getattr(torch.ops.fxkit, name).default
            declare_type(overload)(type_of)
            _made[name] = library, overload  # what a library registers lives as long as it does
        return _made[name][1]
