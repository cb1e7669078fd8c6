"""What it costs to get a graph, for each node of it: fxkit beside torch's own ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import fxkit
from fxkit.demo.model import SentenceEncoder, load
from fxkit.demo.sentences import ALL
from fxkit.view.text_table import duration, table

Encoder = SentenceEncoder
Inputs = tuple[torch.Tensor, ...]


def run(rounds: int, *, with_peer: bool) -> str:
    """Capture the demo's model in every way and return a table."""
    demo = load()
    inputs = demo.inputs(ALL[:16])
    ways: dict[str, Callable[[Encoder, Inputs], int]] = {
        "fxkit.capture live": _live,
        "torch.fx.symbolic_trace": _symbolic,
    }
    if with_peer:
        ways |= {"torch.export": _export, "Dynamo": _dynamo}
    demo.encoder(*inputs)
    rows = [_row(name, way, demo.encoder, inputs, rounds) for name, way in ways.items()]
    return table(["all-MiniLM-L6-v2", "nodes", "time", "a node"], rows, align="<>>>")


def _row(
    name: str, way: Callable[[Encoder, Inputs], int], encoder: Encoder, inputs: Inputs, rounds: int
) -> list[str]:
    best, nodes = float("inf"), 0
    for _ in range(max(1, min(3, rounds // 5))):
        start = time.perf_counter()
        try:
            nodes = way(encoder, inputs)
        except Exception as error:  # a tool that can't do it gets a row that says so
            return [name, "–", type(error).__name__, "–"]
        best = min(best, time.perf_counter() - start)
    return [name, str(nodes), duration(best), duration(best / nodes)]


def _live(encoder: Encoder, inputs: Inputs) -> int:
    return len(fxkit.capture(encoder, inputs, mode="live").graph_module.graph.nodes)


def _symbolic(encoder: Encoder, inputs: Inputs) -> int:
    return len(fx.symbolic_trace(encoder).graph.nodes)


def _export(encoder: Encoder, inputs: Inputs) -> int:
    return len(torch.export.export(encoder, inputs).graph.nodes)


def _dynamo(encoder: Encoder, inputs: Inputs) -> int:
    nodes = []

    def count(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        nodes.append(len(graph_module.graph.nodes))
        return graph_module.forward

    torch.compiler.reset()
    torch.compile(encoder, backend=count)(*inputs)
    return sum(nodes)
