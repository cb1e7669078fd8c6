"""How a graph's code takes its inputs: `torch.export` and Dynamo make graphs that flatten them."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxkit.torch_adapters.private_names import private

_CODE = private(
    "torch.fx.graph._PyTreeCodeGen",
    "telling graphs that flatten their inputs",
    "what such graphs hold is looked for",
)


def codegen_of(graph: fx.Graph) -> Any:
    """Return what writes a graph's code."""
    return graph._codegen


def flattens_inputs(graph: fx.Graph) -> bool:
    """Tell whether a graph's code flattens its inputs, and nests its result."""
    kind = _CODE.get()
    code = codegen_of(graph)
    return hasattr(code, "pytree_info") if kind is None else isinstance(code, kind)


def exchange_graph(gm: fx.GraphModule, graph: fx.Graph) -> None:
    """Give a module another graph, whose owner it is already; its code stays as it is."""
    gm._graph = graph


def set_tracer(gm: fx.GraphModule, tracer: type[fx.Tracer]) -> None:
    """Let a module, and copies and pickles of it, be traced by a class."""
    gm._tracer_cls = gm.graph._tracer_cls = tracer
