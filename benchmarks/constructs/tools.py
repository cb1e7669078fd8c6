"""The ways to get a graph that are compared: fxkit's modes and torch's own tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fxkit
from benchmarks.constructs.judge import Program, Tool
from fxkit.tracing.captured import Captured

Prepared = tuple[Program, Callable[[], bool]]


def _fxkit(mode: str) -> Tool:
    def prepare(fn: Program, args: tuple[Any, ...]) -> Prepared:
        if mode == "symbolic":
            captured = fxkit.capture(fn, args, mode=mode)
            fn(*args)
            return captured, lambda: captured.whole
        captured = Captured(fn)
        captured(*args)
        return captured, lambda: captured.whole

    return Tool(f"fxkit {mode}", prepare)


def _symbolic(fn: Program, args: tuple[Any, ...]) -> Prepared:
    module = torch.fx.symbolic_trace(fn)
    return module, lambda: True


def _jit(fn: Program, args: tuple[Any, ...]) -> Prepared:
    traced: Any = torch.jit.trace(fn, args, check_trace=False)
    return traced, lambda: True


def _make_fx(fn: Program, args: tuple[Any, ...]) -> Prepared:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn)(*args), lambda: True


def _export(fn: Program, args: tuple[Any, ...]) -> Prepared:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if isinstance(fn, torch.nn.Module):
                self.inner = fn

        def forward(self, *values: Any) -> Any:
            return fn(*values)

    module = fn if isinstance(fn, torch.nn.Module) else Wrapped()
    return torch.export.export(module, args, strict=False).module(), lambda: True


def _dynamo(fn: Program, args: tuple[Any, ...]) -> Prepared:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(fn, backend=backend)
    compiled(*args)
    return compiled, lambda: bool(graphs) and not counters["graph_break"]


def tools(*, with_peer: bool) -> list[Tool]:
    """Return fxkit's modes, and torch's own tools where wanted."""
    ours = [_fxkit(mode) for mode in ("whole", "symbolic")]
    if not with_peer:
        return ours
    return [
        *ours,
        Tool("torch.compile (Dynamo)", _dynamo),
        Tool("torch.export", _export),
        Tool("make_fx", _make_fx),
        Tool("torch.jit.trace", _jit),
        Tool("torch.fx.symbolic_trace", _symbolic),
    ]
