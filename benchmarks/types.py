"""What it costs to know the type of every node, beside torch's own propagation."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.shape_prop import ShapeProp

import fxkit
from fxkit.analysis.tensor_types import TypeAnalysis
from fxkit.analysis.type_inference.type_memory import forget_results
from fxkit.view.texts.text_table import duration, table

Program = tuple[fx.GraphModule, tuple[torch.Tensor, ...]]

_NODES = 10_000
_GOAL = 60e-6  # seconds a node
_FEWEST = 3  # timed runs of fxkit


def run(rounds: int, *, with_peer: bool) -> str:
    """Find the types of graphs of 10,000 nodes in every way and return tables.

    All times are CPU seconds of this process (`time.process_time`), medians of runs in turn.

    Args:
        rounds: Twice the timed runs of fxkit; torch's take part in every fifth of those.
        with_peer: Whether torch's own propagation is timed too.
    """
    rows, updates = [], []
    for name, make in _PROGRAMS.items():
        gm, args = make()
        rows += _rows(name, gm, _in_turn(gm, args, rounds, with_peer))
        updates.append(_update_row(name, gm, args, rounds))
    headers = ["from scratch", "nodes", "by", "a node", "in all", "goal"]
    first = table(headers, rows, align="<><>><")
    headers = ["after one rewrite", "nodes", "visited", "in all", "each node compared"]
    return f"{first}\n\n{table(headers, updates, align='<>>>>')}"


def _in_turn(
    gm: fx.GraphModule, args: tuple[torch.Tensor, ...], rounds: int, with_peer: bool
) -> Mapping[str, float]:
    ways: dict[str, Callable[[], Any]] = {
        "fxkit": lambda: _forgetful(gm, args),
        "fxkit, seen before": lambda: fxkit.propagate_types(gm, args),
    }
    if with_peer:
        ways["torch FakeTensorProp"] = lambda: FakeTensorProp(gm, _mode()).propagate(*args)
        ways["torch ShapeProp, fake"] = lambda: ShapeProp(gm, _mode()).propagate(*args)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(max(rounds // 2, _FEWEST)):
        for name, way in ways.items():
            if index % 5 == 0 or name.startswith("fxkit"):
                taken[name].append(_seconds(way))
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _forgetful(gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> None:
    forget_results()
    fxkit.propagate_types(gm, args)


def _mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def _seconds(work: Callable[[], Any]) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def _rows(name: str, gm: fx.GraphModule, seconds: Mapping[str, float]) -> list[list[str]]:
    nodes = len(gm.graph.nodes)
    rows = []
    for way, taken in seconds.items():
        each = taken / nodes
        goal = ""
        if way == "fxkit":
            goal = f"≤ 60 µs: {'met' if each <= _GOAL else 'MISSED'}"
        rows.append([name if not rows else "", f"{nodes:,}" if not rows else "", way,
                     f"{each * 1e6:.1f} µs", duration(taken), goal])  # fmt: skip
    return rows


def _update_row(
    name: str, gm: fx.GraphModule, args: tuple[torch.Tensor, ...], rounds: int
) -> list[str]:
    """Replace a node in the middle by another of the same type, and bring the types up to date."""
    types = TypeAnalysis(gm, args)
    by_journal, by_looking, visited = [], [], 0
    for _ in range(max(rounds, _FEWEST) + 2):  # the first two meet operators not seen before
        middle = _middle(gm)
        with fxkit.edit(gm) as e:
            target = torch.tanh if middle.target is torch.sigmoid else torch.sigmoid
            e.replace(middle, e.call(target, middle.args[0], before=middle))
        start = time.process_time()
        visited = types.update(e.journal)
        by_journal.append(time.process_time() - start)
        by_looking.append(_seconds(types.update))
    return [name, f"{len(gm.graph.nodes):,}", f"{visited}",
            duration(statistics.median(by_journal[2:])),
            duration(statistics.median(by_looking[2:]))]  # fmt: skip


def _middle(gm: fx.GraphModule) -> fx.Node:
    pointwise = (F.gelu, F.relu, torch.relu, torch.tanh, torch.sigmoid)
    found = [node for node in gm.graph.nodes if node.target in pointwise]
    return found[len(found) // 2]


class _Attention(nn.Module):
    """One layer of a transformer, spelled out: 30 nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, 4, 16).transpose(1, 2) for part in (q, k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, 64))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _Residual(nn.Module):
    """One block of a convolutional network: 9 nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm(self.conv(x)))
        return F.relu(x + self.norm2(self.conv2(inner)))


def _stack(block: type[nn.Module], nodes_each: int, *shape: int) -> Program:
    blocks = nn.Sequential(*(block() for _ in range(_NODES // nodes_each))).eval()
    return fxkit.symbolic_trace(blocks), (torch.randn(*shape),)


def _chain() -> Program:
    graph = fx.Graph()
    x = value = graph.placeholder("x")
    for _ in range(_NODES // 3):
        value = graph.call_function(torch.add, (value, 1.0))
        value = graph.call_function(torch.relu, (value,))
        value = graph.call_function(torch.mul, (value, x))
    graph.output(value)
    return fx.GraphModule(nn.Module(), graph), (torch.randn(4, 8),)


_PROGRAMS: dict[str, Callable[[], Program]] = {
    "add, relu, mul in a chain": _chain,
    "transformer layers": lambda: _stack(_Attention, 30, 2, 7, 64),
    "convolutional blocks": lambda: _stack(_Residual, 8, 2, 8, 14, 14),
}
