"""Random programs of pointwise operators, reductions, views and moves, for tests and the sweep."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

UNARY = [torch.sigmoid, torch.tanh, torch.relu, torch.abs, torch.neg, F.gelu, F.silu, torch.sin]
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum]
WHOLE_UNARY = [torch.abs, torch.neg, torch.bitwise_not, torch.sign]
SHAPES = [(6, 20), (3, 6, 20), (6, 1), (20,), (1, 20), (3, 1, 20), (20, 6), (7, 3), ()]
DTYPES = [torch.float32] * 6 + [torch.float64, torch.bfloat16, torch.int64, torch.int32]

# Values stay small enough for a program to be quick.
MOST_ELEMENTS = 2000

Move = tuple[Callable[..., Any], tuple[Any, ...]]


def random_program(random: Random) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """Return a graph and inputs; each node takes any earlier values whose shapes allow it."""
    torch.manual_seed(random.randrange(2**20))
    return _Writer(random).program()


class _Writer:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._graph = fx.Graph()
        self._inputs: list[torch.Tensor] = []
        self._values: list[tuple[Any, torch.Tensor]] = []
        self._steps = {
            self._unary: 3, self._binary: 5, self._reduction: 1, self._softmax: 1, self._shape: 2,
            self._choice: 1, self._move: 5, self._join: 2, self._cast: 1, self._embedding: 1,
        }  # fmt: skip

    def program(self) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
        for _ in range(3):
            dtype, shape = self._random.choice(DTYPES), self._random.choice(SHAPES)
            self._input(torch.randn(shape).mul(3).to(dtype), is_operand=True)
        kinds = list(self._steps)
        weights = list(self._steps.values())
        for _ in range(self._random.randint(3, 14)):
            self._random.choices(kinds, weights)[0]()
        made = [node for node, _ in self._values if node.op != "placeholder"]
        outputs = [node for node in made if self._random.random() < 0.4] or made[-1:]
        self._graph.output(tuple(outputs))
        return fx.GraphModule(nn.Module(), self._graph), tuple(self._inputs)

    def _input(self, tensor: torch.Tensor, is_operand: bool = False) -> fx.Node:
        last = next((n for n in self._graph.nodes if n.op != "placeholder"), None)
        where = self._graph.inserting_before(last) if last else self._graph.inserting_after(None)
        with where:
            node = self._graph.placeholder(f"x{len(self._inputs)}")
        self._inputs.append(tensor)
        if is_operand:
            self._values.append((node, tensor))
        return node

    def _apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function of values, numbers and new inputs, unless its result is too large."""
        nodes: dict[int, Any] = {id(tensor): node for node, tensor in self._values}

        def node_of(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(node_of, value))
            if not isinstance(value, torch.Tensor):
                return value
            return nodes[id(value)] if id(value) in nodes else self._input(value)

        result = function(*args, **kwargs)
        if not 0 < result.numel() <= MOST_ELEMENTS or result is args[0]:
            return
        node = self._graph.call_function(function, tuple(map(node_of, args)), kwargs)
        self._values.append((node, result))

    def _any(self, rank: int = 0) -> torch.Tensor | None:
        """Return one of the values that have so many dimensions, the later the likelier."""
        found = [t for _, t in self._values if t.dim() >= rank and t.dtype != torch.bool]
        return self._random.choice(found[-6:]) if found else None

    def _dim(self, x: torch.Tensor) -> int:
        return self._random.randrange(-x.dim(), x.dim())

    def _unary(self) -> None:
        x = self._any()
        if x is not None:
            self._apply(self._random.choice(UNARY if x.is_floating_point() else WHOLE_UNARY), x)

    def _binary(self) -> None:
        x, y = self._any(), self._any()
        if x is not None and y is not None and _broadcast(x, y):
            self._apply(self._random.choice(BINARY), x, y)

    def _choice(self) -> None:
        x, y = self._any(), self._any()
        if x is not None and y is not None and x.dtype == y.dtype and _broadcast(x, y):
            self._apply(torch.lt, x, y)
            if self._values[-1][1].dtype == torch.bool:
                self._apply(torch.where, self._values[-1][1], x, y)

    def _reduction(self) -> None:
        x = self._any(1)
        if x is not None and x.dtype in (torch.float32, torch.float64):
            function = self._random.choice([torch.mean, torch.sum, torch.amax])
            self._apply(function, x, dim=self._dim(x), keepdim=self._random.random() < 0.5)

    def _softmax(self) -> None:
        x = self._any(1)
        if x is not None and x.dtype in (torch.float32, torch.float64):
            function = self._random.choice([F.softmax, F.log_softmax])
            self._apply(function, x, dim=self._dim(x))

    def _shape(self) -> None:
        x = self._any(1)
        if x is None:
            return
        name = self._random.choice(["unsqueeze", "transpose", "squeeze"])
        dim = self._dim(x)
        self._apply(getattr(torch, name), x, *((dim, -1) if name == "transpose" else (dim,)))

    def _cast(self) -> None:
        x = self._any()
        if x is not None and x.is_floating_point():
            dtype = self._random.choice([torch.float32, torch.float64, torch.bfloat16])
            self._apply(torch.Tensor.to, x, dtype)

    def _embedding(self) -> None:
        x = self._any(2)
        if x is not None and x.dim() == 2:
            shape = self._random.choice([(4,), (2, 3), (1, 7)])
            self._apply(F.embedding, torch.randint(0, x.shape[0], shape), x)

    def _join(self) -> None:
        x = self._any(1)
        if x is None:
            return
        alike = [t for _, t in self._values if t.shape == x.shape and t.dtype == x.dtype]
        chosen = [self._random.choice(alike) for _ in range(self._random.randint(1, 3))]
        self._apply(self._random.choice([torch.cat, torch.stack]), chosen, dim=self._dim(x))

    def _move(self) -> None:
        x = self._any(1)
        if x is not None:
            function, args = self._random.choice(self._moves(x))
            self._apply(function, x, *args)

    def _moves(self, x: torch.Tensor) -> list[Move]:
        """Return operators that move the elements of a tensor, each with its other arguments."""
        dim = self._dim(x)
        size = x.shape[dim]
        first = self._random.randrange(size)
        count = self._random.randint(1, size - first)
        shift = self._random.randint(-4, 4)
        key = [slice(None)] * (dim % x.dim())
        ids = torch.randint(0, size, (self._random.randint(1, 6),))
        divisor = next(d for d in (5, 3, 2, 1) if x.numel() % d == 0)
        parts = next(d for d in (4, 3, 2, 1) if size % d == 0)
        moves: list[Move] = [
            (torch.narrow, (dim, first, count)),
            (torch.select, (dim, first)),
            (operator.getitem, ((*key, slice(first, None, 1 + shift % 2)),)),
            (operator.getitem, ((*key, ids - size),)),
            (torch.flip, ([dim],)),
            (torch.roll, (shift, dim)),
            (F.pad, ((self._random.randint(0, 2), shift % 3), "constant", shift)),
            (F.pad, ((-self._random.randrange(x.shape[-1]), shift % 2),)),
            (torch.reshape, ((divisor, -1),)),
            (torch.reshape, ((-1, divisor),)),
            (torch.flatten, ()),
            (torch.unflatten, (dim, (parts, -1))),
            (torch.movedim, (dim, 0)),
            (torch.repeat_interleave, (2, dim)),
            (torch.tile, ((1 + shift % 2, 2),)),
            (torch.index_select, (dim, ids)),
            (torch.diff, (1, dim)),
            (torch.Tensor.expand, ((2, *x.shape),)),
        ]
        if x.dim() >= 2:
            moves += [(torch.tril, (shift,)), (torch.triu, (shift,)), (torch.rot90, (shift,))]
            moves += [(torch.diagonal, (shift % 2,)), (torch.Tensor.unfold, (dim, count, 2))]
            moves += [(torch.gather, (dim, torch.randint(0, size, x.shape)))]
        return moves


def _broadcast(x: torch.Tensor, y: torch.Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def compare(
    compiled: Callable[..., Any], gm: fx.GraphModule, inputs: tuple[torch.Tensor, ...]
) -> None:
    """Hold the results of a compiled program to eager's."""
    for a, b in zip(compiled(*inputs), gm(*inputs), strict=True):
        assert (a.dtype, a.shape, _steps(a)) == (b.dtype, b.shape, _steps(b))
        tolerance = 4e-2 if b.dtype == torch.bfloat16 else 2e-4
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 10, equal_nan=True)


def _steps(x: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions along which there are neighbours."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]
