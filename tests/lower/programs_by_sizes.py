"""Random programs that are written for any two sizes, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

UNARY = [torch.sigmoid, torch.tanh, torch.relu, torch.neg, F.gelu, torch.sin, torch.square]
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum]

# Of the inputs: "a" and "b" are free, numbers are not.
SHAPES: list[tuple[Any, ...]] = [("a", "b"), ("a", 1), ("b",), ("a", "b", 4), ("b", "a"), (4, "b")]

Values = list[torch.Tensor]
Step = Callable[[Values], torch.Tensor | None]


@dataclass(frozen=True)
class Program:
    """A program and the shapes of its inputs; callable with the inputs."""

    shapes: tuple[tuple[Any, ...], ...]
    steps: tuple[Step, ...]

    def inputs(self, a: int, b: int) -> tuple[torch.Tensor, ...]:
        """Return inputs of two sizes."""
        sizes = {"a": a, "b": b}
        return tuple(torch.randn([sizes.get(n, n) for n in shape]) for shape in self.shapes)

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run it; a step that has no place at these sizes is left out."""
        values = list(inputs)
        for step in self.steps:
            result = step(values)
            if result is not None:
                values.append(result)
        return tuple(values[len(inputs) :])


def random_program(random: Random) -> Program:
    """Return a program; each step takes values by their number, so that all sizes run alike."""
    shapes = tuple(random.choice(SHAPES) for _ in range(3))
    kinds = [_unary, _unary, _binary, _binary, _binary, _reduction, _row, _view, _move, _product]
    return Program(shapes, tuple(random.choice(kinds)(random) for _ in range(random.randint(4, 9))))


def _unary(random: Random) -> Step:
    function, place = random.choice(UNARY), random.random()
    return lambda values: function(_pick(values, place))


def _binary(random: Random) -> Step:
    function, one, other = random.choice(BINARY), random.random(), random.random()

    def step(values: Values) -> torch.Tensor | None:
        x, y = _pick(values, one), _pick(values, other)
        return function(x, y) if _broadcast(x, y) else None

    return step


def _reduction(random: Random) -> Step:
    function, place = random.choice([torch.mean, torch.sum]), random.random()
    dim, keepdim = random.choice([-1, 0]), random.random() < 0.5
    return _of_rank(1, place, lambda x: function(x, dim=dim, keepdim=keepdim))


def _row(random: Random) -> Step:
    dim, place = random.choice([-1, 0]), random.random()
    layer = random.random() < 0.5
    norm: Callable[[torch.Tensor], torch.Tensor] = lambda x: F.layer_norm(x, x.shape[-1:])  # noqa: E731
    return _of_rank(1, place, norm if layer else lambda x: torch.softmax(x, dim))


def _view(random: Random) -> Step:
    place = random.random()
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.transpose(0, -1),
        lambda x: x.unsqueeze(0),
        lambda x: x.flatten(),
        lambda x: x.reshape(-1, x.shape[-1]),
        lambda x: x.expand(2, *x.shape),
    ]
    return _of_rank(1, place, random.choice(views))


def _move(random: Random) -> Step:
    place, dim = random.random(), random.choice([-1, 0])
    moves: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: torch.cat([x, x * 2], dim),
        lambda x: x.narrow(dim, 1, x.shape[dim] - 1) if x.shape[dim] > 1 else x * 3,
        lambda x: x.flip(dim),
        lambda x: F.pad(x, (1, 2)),
        lambda x: x.roll(1, dim),
        lambda x: torch.stack([x, x + 1]),
        lambda x: torch.cumsum(x, dim),
    ]
    return _of_rank(1, place, random.choice(moves))


def _product(random: Random) -> Step:
    place = random.random()
    return _of_rank(2, place, lambda x: torch.relu(x @ x.transpose(-1, -2)) * 0.1)


def _of_rank(rank: int, place: float, function: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    def step(values: Values) -> torch.Tensor | None:
        x = _pick(values, place)
        return function(x) if x.dim() >= rank and x.numel() < 200_000 else None

    return step


def _pick(values: Values, place: float) -> torch.Tensor:
    """Return one of the last values."""
    last = values[-6:]
    return last[int(place * len(last))]


def _broadcast(x: torch.Tensor, y: torch.Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs) and max(x.dim(), y.dim()) < 5
