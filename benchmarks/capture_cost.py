"""What it costs to get a graph, for each node of it: fxkit beside torch's own ways."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import fxkit
from fxkit.demo.model import SentenceEncoder, load
from fxkit.demo.sentences import ALL
from fxkit.timing import in_turn
from fxkit.view.texts.text_table import duration, table

Encoder = SentenceEncoder
Inputs = tuple[torch.Tensor, ...]

_CHECKS = 100


@dataclass(frozen=True)
class Way:
    """A way to get a graph.

    Attributes:
        name: What it is called.
        count: Gets the graph and returns its number of nodes.
        runs_it: Whether that runs the model on real tensors once; that time is taken off.
    """

    name: str
    count: Callable[[Encoder, Inputs], int]
    runs_it: bool = False


def run(rounds: int, *, with_peer: bool) -> str:
    """Capture the demo's model in every way and return a table."""
    demo = load()
    inputs = demo.inputs(ALL[:2])
    ways = [
        Way("fxkit.capture whole", _whole, runs_it=True),
        Way("fxkit.capture whole, symbolic sizes", _free, runs_it=True),
        Way("torch.fx.symbolic_trace", _symbolic),
    ]
    if with_peer:
        ways += [Way("torch.export", _export), Way("Dynamo", _dynamo, runs_it=True)]
    model_seconds = in_turn({"model": lambda: demo.encoder(*inputs)}, rounds=rounds)["model"]
    guards = in_turn({"guards": _guards(demo.encoder, inputs)}, rounds=rounds)["guards"]
    rows = [_row(way, demo.encoder, inputs, rounds, model_seconds) for way in ways]
    headers = ["all-MiniLM-L6-v2", "nodes", "less a run of the model", "a node"]
    text = table(headers, rows, align="<>>>")
    return f"{text}\nentry guards of the whole capture: {duration(guards / _CHECKS)} a call"


def _row(
    way: Way, encoder: Encoder, inputs: Inputs, rounds: int, model_seconds: float
) -> list[str]:
    seconds, nodes = [], 0
    for _ in range(max(2, rounds // 4)):
        start = time.perf_counter()
        try:
            nodes = way.count(encoder, inputs)
        except Exception as error:  # a tool that can't do it gets a row that says so
            return [way.name, "–", type(error).__name__, "–"]
        seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds) - (model_seconds if way.runs_it else 0.0)
    return [way.name, str(nodes), duration(took), duration(took / nodes)]


def _whole(encoder: Encoder, inputs: Inputs) -> int:
    return len(fxkit.capture(encoder, inputs).graph_module.graph.nodes)


def _free(encoder: Encoder, inputs: Inputs) -> int:
    return len(fxkit.capture(encoder, inputs, dynamic=True).graph_module.graph.nodes)


def _guards(encoder: Encoder, inputs: Inputs) -> Callable[[], None]:
    """Return a function that checks the entry guards of a captured model `_CHECKS` times."""
    captured = fxkit.capture(encoder, inputs)
    captured(*inputs)
    call = captured.take_apart(inputs, {})
    (variant,) = captured.kept

    def check() -> None:
        for _ in range(_CHECKS):
            variant.mismatch(call)

    return check


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
