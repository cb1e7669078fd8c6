"""`fxkit.compile`: capture, the simplifying passes, fused C++ kernels, behind one call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.errors import CaptureError, InvalidGraphError, UnsupportedError
from fxkit.lower import CompiledModule, to_cpp
from fxkit.lower.running.compiled import left_to_eager
from fxkit.passes.base import Pass
from fxkit.passes.manager import PassManager
from fxkit.passes.pipelines import SIMPLIFY
from fxkit.tracing.captured import Captured


class Compiled:
    """A program that runs as fused kernels wherever it could be captured; made by `compile`.

    Attributes:
        captured: The captured program, with its guards and graphs.
        modules: What was compiled, one module for each captured graph, the last one last.
    """

    def __init__(self, fn: Callable[..., Any], passes: tuple[Pass, ...]) -> None:
        self._passes = passes
        self.modules: list[CompiledModule] = []
        self.captured = Captured(fn, backend=self._lower)
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; the first call with inputs of a kind captures and compiles it."""
        return self.captured(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Say whether a call would run compiled, or which guard stops it."""
        return self.captured.explain(*args, **kwargs)

    def report(self) -> str:
        """Return what was fused and what was not, for each compiled graph, as text."""
        if not self.modules:
            return "nothing has been compiled yet: call it first"
        return "\n\n".join(str(module.report()) for module in self.modules)

    def _lower(self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> CompiledModule:
        try:
            copied = fx.GraphModule(gm, _copy_graph(gm.graph))
            PassManager(self._passes, verify="structure", args=args).run(copied)
            module = to_cpp(copied, args)
        except InvalidGraphError as error:
            warnings.warn(f"{error}\n  The captured graph runs in eager.", stacklevel=2)
            module = left_to_eager(gm, error.message)
        self.modules.append(module)
        return module


def compile(fn: Callable[..., Any] | None = None, *, passes: tuple[Pass, ...] = SIMPLIFY) -> Any:
    """Make a program run as fused C++ kernels; works as a decorator and as a call.

    The first call with inputs of a kind runs the program once, records it, rewrites the graph by
    the simplifying passes and builds its kernels. Later calls run those as long as every guard
    holds; what can't be captured runs in Python. With gradients on and asked for, the captured
    graph runs in eager, since kernels have no gradient.

    Args:
        fn: A function, module or bound method.
        passes: The passes to run before lowering.

    Returns:
        A `Compiled`, callable like `fn`; as a decorator with options, the decorator.

    Raises:
        UnsupportedError: When `fn` can't be called.

    Example:
        >>> import torch, fxkit
        >>> @fxkit.compile
        ... def f(x):
        ...     return torch.softmax(x * 2, -1)
        >>> with torch.no_grad():
        ...     y = f(torch.ones(4, 8))
    """
    if fn is None:
        return functools.partial(compile, passes=passes)
    if not callable(fn):
        raise UnsupportedError(
            f"expected something to call, got {type(fn).__name__}",
            hint="pass a function or a module",
        )
    return Compiled(fn, tuple(passes))


def dynamo_backend(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's; registered as `torch.compile(fn, backend="fxkit")`.

    A graph of dynamic shapes is compiled once for each set of sizes that it is called with. Graphs
    that need gradients run in eager, and autograd sees through them.

    Args:
        gm: The graph that Dynamo has captured.
        example_inputs: Stand-ins for its inputs; kernels are built for those of the first call.
        options: `{"passes": passes}` to run other passes than the simplifying ones.

    Returns:
        What Dynamo calls in place of the graph.

    Raises:
        UnsupportedError: When there is no such option.
    """
    del example_inputs
    chosen = dict(options or {})
    passes = chosen.pop("passes", SIMPLIFY)
    if chosen:
        raise UnsupportedError(
            f"expected no option but passes, got {', '.join(chosen)}",
            hint='write torch.compile(fn, backend="fxkit", options={"passes": [...]})',
        )
    return Compiled(gm.forward, tuple(passes))


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph with its types and provenance, so that a pipeline leaves the captured one."""
    copied = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        values[node] = copied.node_copy(node, values.__getitem__)
    if graph._codegen is None:
        raise CaptureError("expected a graph with code, got none")
    return copied
