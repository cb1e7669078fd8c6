"""Capture a function of a few lines, such as a pattern, for a fraction of what a program costs.

A tracer of torch.fx stands in for `__call__` and `__getattr__` of `nn.Module` while it follows a
program. CPython then forgets what it has looked up in every class of modules that there is, which
takes longer than to follow a few lines does. What calls no module needs neither.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.nn.modules.module import register_module_forward_pre_hook

from fxkit.errors import CaptureError
from fxkit.torch_adapters.fx_tracing import can_trace_functions, tracing_functions
from fxkit.tracing.symbolic import SymbolicTracer, traced

_HELD = (torch.Tensor, torch.nn.Module)


def trace_function(function: Callable[..., Any]) -> fx.Graph:
    """Do as `symbolic_trace` for a small function without state; return its graph alone.

    Args:
        function: The function.

    Raises:
        CaptureError: As for `symbolic_trace`.
    """
    for tracer in (_ShortTracer(), SymbolicTracer(wraps_math=False)):
        with contextlib.suppress(CaptureError):
            return traced(tracer, function)
    return traced(SymbolicTracer(), function)


class _ShortTracer(SymbolicTracer):
    """A tracer that refuses modules, and tensors that are no parameters of the function."""

    def __init__(self) -> None:
        super().__init__(wraps_math=False)

    def create_arg(self, a: Any) -> Any:
        """Return a value as an argument of a node."""
        if isinstance(a, _HELD):
            raise CaptureError(f"expected placeholders, got {type(a).__name__}")
        return super().create_arg(a)

    def follow(self, function: Callable[..., Any], concrete_args: Any = None) -> fx.Graph:
        """Return the graph of a function of Python."""
        if not can_trace_functions:
            return super().follow(function, concrete_args)
        self.root, self.tensor_attrs = torch.nn.Module(), {}
        self.graph = fx.Graph(tracer_cls=type(self))
        called, args = self.create_args_for_root(function, is_module=False)
        with _no_modules_called(), tracing_functions():
            result = self.create_arg(called(*args))
        annotation = getattr(function, "__annotations__", {}).get("return")
        self.create_node("output", "output", (result,), {}, type_expr=annotation)
        return self.graph


@contextlib.contextmanager
def _no_modules_called() -> Iterator[None]:
    """Refuse calls of modules by this thread; others go on with theirs."""
    thread = threading.get_ident()

    def refuse(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == thread:
            raise CaptureError(f"expected functions, got a call of {type(module).__name__}")

    hook = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
