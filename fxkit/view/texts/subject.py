"""What a view looks at: a graph module, something that holds one, or a program to capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxkit.errors import UnsupportedError
from fxkit.ir.graph_arguments import check_args
from fxkit.passes.subjects import Subject, graph_inputs
from fxkit.torch_adapters.fx_graphs import flattens_inputs
from fxkit.tracing import capture
from fxkit.tracing.captured import Captured
from fxkit.tracing.partial import Partial


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
    if args is not None:
        check_args(args)
    if isinstance(subject, fx.GraphModule):
        return subject
    if isinstance(subject, torch.export.ExportedProgram):
        return Subject.of(subject, None, {}).graph_module
    inner = getattr(subject, "lowered", None) or getattr(subject, "graph_module", None)
    if isinstance(inner, fx.GraphModule):
        return inner
    if callable(subject) and (args is not None or kwargs is not None):
        return capture(subject, tuple(args or ()), dict(kwargs or {})).graph_module
    raise UnsupportedError(
        f"expected a torch.fx.GraphModule or something that holds one, got {_name_of(subject)}",
        hint="give its inputs too, as a tuple, and it is captured"
        if callable(subject)
        else "make one with fxkit.capture(fn, args) or fxkit.symbolic_trace(module)",
    )


@dataclass(frozen=True)
class Runnable:
    """A program that is run to be looked at.

    Attributes:
        graph_module: Its graph.
        args: Inputs of the graph.
        kwargs: More of them, by name.
        call: Calls the program itself.
    """

    graph_module: fx.GraphModule
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: Callable[[], Any]


def runnable(
    subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Runnable:
    """Return the graph of a program with what it takes for these inputs of the program.

    Args:
        subject: A graph module, what holds one, or any callable, which is captured.
        args: Inputs of the program.
        kwargs: More inputs, by name.

    Raises:
        UnsupportedError: There is none that can be run.
        CaptureError: The callable can't be captured.
    """
    check_args(args)
    inputs = (tuple(args), dict(kwargs or {}))
    if isinstance(subject, Partial):
        raise UnsupportedError(
            "expected a program in one graph, got one in pieces",
            hint='capture it in mode "whole", or look at each of its .graphs',
        )
    program = subject
    if not _holds_graph(subject) and callable(subject):
        program = capture(subject, *inputs)
    if isinstance(program, Captured | torch.export.ExportedProgram):
        found = Subject.of(program, *inputs)
        gm, graph_args, graph_kwargs = found.graph_module, found.args or (), found.kwargs
    else:
        gm, graph_args, graph_kwargs = graph_module_of(program), *inputs
        whole = getattr(program, "graph_module", None)  # of a compiled one, which takes tensors
        if isinstance(whole, fx.GraphModule) and flattens_inputs(whole.graph):
            graph_args, graph_kwargs = tuple(graph_inputs(whole.graph, *inputs)), {}
    is_called = callable(subject) and not isinstance(subject, torch.export.ExportedProgram)
    called = subject if is_called else gm
    return Runnable(gm, graph_args, graph_kwargs, lambda: called(*inputs[0], **inputs[1]))


def _holds_graph(subject: Any) -> bool:
    if isinstance(subject, fx.GraphModule | torch.export.ExportedProgram):
        return True
    held = getattr(subject, "lowered", None) or getattr(subject, "graph_module", None)
    return isinstance(held, fx.GraphModule)


def _name_of(subject: Any) -> str:
    kind = type(subject).__name__
    return kind if isinstance(subject, nn.Module) else getattr(subject, "__name__", kind)
