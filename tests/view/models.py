"""Graphs that the tests of this folder look at, and a short profile of one."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxkit.view import Profile, profile


class Block(nn.Module):
    """A layer of a small transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        scores = torch.softmax(self.query(y) @ self.key(y).transpose(-1, -2) + mask, -1)
        x = x + scores @ y
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Layers that all read one mask."""

    def __init__(self, layers: int = 6, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 32)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Unequal(nn.Module):
    """Two layers of the same class that do not do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
                nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
                nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Shared(nn.Module):
    """One module that is called twice, with something between."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.sin(self.block(x)))


class TwoResults(nn.Module):
    """A layer that also returns what is in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return torch.relu(y) + x, y


class LateExit(nn.Module):
    """Layers in layers, of which the last alone has a second result that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(nn.ModuleList(TwoResults() for _ in range(3)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for layers in self.outer:
            assert isinstance(layers, nn.ModuleList)
            for layer in layers:
                x, y = layer(x)
        return x, y


def stack(layers: int = 6) -> fx.GraphModule:
    """Return a trace of `Stack`."""
    return fx.symbolic_trace(Stack(layers))


def stack_args() -> tuple[Tensor, Tensor]:
    """Return inputs for `stack`."""
    return torch.arange(6).view(2, 3), torch.zeros(3, 3)


def empty() -> fx.GraphModule:
    """Return a graph without any node."""
    return fx.GraphModule(nn.Module(), fx.Graph())


def wide(arguments: int = 1000) -> fx.GraphModule:
    """Return a graph in which one node has very many arguments."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = [graph.call_function(torch.sin, (x,)) for _ in range(arguments)]
    graph.output(graph.call_function(torch.cat, (parts,)))
    return fx.GraphModule(nn.Module(), graph)


def random_graph(nodes: int, seed: int = 0, reach: int = 30) -> fx.GraphModule:
    """Return a graph of additions of earlier values."""
    generator = random.Random(seed)
    graph = fx.Graph()
    made = [graph.placeholder("x")]
    for _ in range(nodes):
        operands = (generator.choice(made[-reach:]), generator.choice(made[-10 * reach :]))
        made.append(graph.call_function(torch.add, operands))
    graph.output(made[-1])
    return fx.GraphModule(nn.Module(), graph)


NASTY = "</script><b>\"x\"&'y' {z} |é|\n\\l %s ]]> bhqk,bhkd->bhqd"


def hostile() -> fx.GraphModule:
    """Return a graph whose constants, names and opaque calls hold all that has to be escaped."""

    def call(x: Tensor, text: str) -> Tensor:
        return x

    call.__name__ = call.__qualname__ = NASTY
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(call, (x, NASTY))
    z = graph.call_function(torch.einsum, ("bhqk,bhkd->bhqd", y, y))
    z.meta["nn_module_stack"] = {"k": (f"a.{NASTY}", NASTY)}
    z.meta["stack_trace"] = f'  File "<{NASTY}>", line 3, in f'
    graph.output((y, z))
    return fx.GraphModule(nn.Module(), graph)


def quick(gm: Any, args: tuple[Any, ...], **options: Any) -> Profile:
    """Profile a module in as few runs as there may be."""
    with torch.no_grad():
        return profile(gm, args, warmup=0, iters=2, **options)
