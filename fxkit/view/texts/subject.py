"""What a view looks at: a graph module, something that holds one, or a program to capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from fxkit.errors import UnsupportedError
from fxkit.tracing import capture


def graph_module_of(
    subject: Any, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None
) -> fx.GraphModule:
    """Return the graph that a captured or compiled program runs, or the graph module itself.

    Args:
        subject: A graph module, what holds one, or, with inputs, any callable, which is captured.
        args: Inputs to capture with.
        kwargs: More inputs, by name.

    Raises:
        UnsupportedError: There is none, and no inputs to capture one with.
        CaptureError: The callable can't be captured.
    """
    if isinstance(subject, fx.GraphModule):
        return subject
    inner = getattr(subject, "lowered", None) or getattr(subject, "graph_module", None)
    if isinstance(inner, fx.GraphModule):
        return inner
    if callable(subject) and (args is not None or kwargs is not None):
        return capture(subject, args or (), dict(kwargs or {})).graph_module
    raise UnsupportedError(
        f"expected a torch.fx.GraphModule or something that holds one, got {_name_of(subject)}",
        hint="give its inputs too, as a tuple, and it is captured"
        if callable(subject)
        else "make one with fxkit.capture(fn, args) or fxkit.symbolic_trace(module)",
    )


def _name_of(subject: Any) -> str:
    kind = type(subject).__name__
    return kind if isinstance(subject, nn.Module) else getattr(subject, "__name__", kind)
