"""What a caller gives where a graph, or the inputs of one, are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.ir.program_changes import GraphProgram
from fxkit.torch_adapters.fx_graphs import flattens_inputs


def graph_module_of(program: Any) -> fx.GraphModule:
    """Return a `torch.fx.GraphModule`, or that of a captured or compiled program.

    Raises:
        UnsupportedError: When it is something else, with how to get the graph of that.
    """
    if not isinstance(program, fx.GraphModule):
        program = getattr(program, "_fxkit_program", program)  # of a compiled module
        program = program.graph_module if isinstance(program, GraphProgram) else program
    check_graph_module(program)
    return program


def check_graph_module(gm: Any) -> None:
    """Refuse what is no `torch.fx.GraphModule`.

    Raises:
        UnsupportedError: When it is something else, with how to get the graph of that.
    """
    if isinstance(gm, fx.GraphModule):
        return
    raise UnsupportedError(
        f"expected a torch.fx.GraphModule, got {type(gm).__name__}", hint=_way_to_a_graph(gm)
    )


def _way_to_a_graph(program: Any) -> str:
    if isinstance(program, torch.export.ExportedProgram):
        return 'take it over with fxkit.capture(program, mode="export"), parameters inside'
    if isinstance(getattr(program, "graph_module", None), fx.GraphModule):
        return "pass its .graph_module"
    return "make one with fxkit.capture(fn, args).graph_module or fxkit.symbolic_trace(module)"


def check_args(args: Any) -> None:
    """Refuse inputs by position that are no tuple.

    Raises:
        UnsupportedError: When they are something else, such as a single tensor.
    """
    if not isinstance(args, (tuple, list)):
        raise UnsupportedError(
            f"expected a tuple of inputs, got {type(args).__name__}",
            hint="write (x,) for a single input" if isinstance(args, torch.Tensor) else None,
        )


def check_inputs(gm: fx.GraphModule, args: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Refuse inputs that are no tuple, or that a graph has no place for.

    Args:
        gm: The module.
        args: Inputs by position.
        kwargs: Inputs by name.

    Raises:
        UnsupportedError: When there are too many, or they are of another kind.
    """
    check_args(args)
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    if flattens_inputs(gm.graph) or any(n.startswith("*") for n in names):
        return
    shown = ", ".join(names) or "none"
    if len(args) > len(names):
        raise UnsupportedError(
            f"expected at most {len(names)} inputs, got {len(args)}",
            hint=f"the graph's inputs are {shown}",
        )
    unknown = [name for name in kwargs or {} if name not in names[len(args) :]]
    if unknown:
        raise UnsupportedError(
            f"expected inputs among {shown}, each once, got {', '.join(unknown)} by name",
            hint="leave it out",
        )
