"""Random programs of pointwise operators, reductions, views and moves, for tests and the sweep."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from tests.lower import random_layers as layers

UNARY = [
    *(torch.sigmoid, torch.tanh, torch.relu, torch.abs, torch.neg, F.gelu, F.silu, torch.sin),
    *(torch.erf, torch.cos, torch.sqrt, torch.square, F.softplus, F.mish, F.hardswish, F.elu),
]
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.div]
WHOLE_UNARY = [torch.abs, torch.neg, torch.bitwise_not, torch.sign, torch.sin, torch.square]
SCALAR = [torch.add, torch.sub, torch.mul, torch.div, torch.clamp_min, torch.clamp_max, torch.gt]
IN_PLACE = [torch.Tensor.add_, torch.Tensor.mul_, torch.Tensor.copy_, torch.Tensor.sub_]
IN_PLACE_ALONE = [torch.relu_, torch.Tensor.neg_, torch.Tensor.zero_, torch.tanh_]
REDUCTIONS = [
    *(torch.mean, torch.sum, torch.amax, torch.amin, torch.logsumexp, torch.var, torch.std),
    *(torch.argmax, torch.argmin, torch.prod, torch.any, torch.all, torch.linalg.vector_norm),
]
SCANS = [torch.cumsum, torch.cumprod]
SHAPES = [
    *((6, 20), (3, 6, 20), (6, 1), (20,), (1, 20), (3, 1, 20), (20, 6), (7, 3), ()),
    *((13, 17), (33,), (1,), (2, 3, 6, 20), (5, 1, 9)),
]
EMPTY_SHAPES = [(0,), (0, 20), (6, 0), (3, 0, 20)]
DTYPES = [torch.float32] * 6 + [
    *(torch.float64, torch.bfloat16, torch.bfloat16, torch.float16, torch.int64, torch.int32),
    *(torch.uint8, torch.bool),
]
# What eager says of arguments that it does not take.
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError)

# Values stay small enough for a program to be quick.
MOST_ELEMENTS = 2000

# From here on up, sizes grow where a program is to be larger.
LEAST_TO_GROW = 6

Move = tuple[Callable[..., Any], tuple[Any, ...]]
Program = tuple[fx.GraphModule, tuple[torch.Tensor, ...]]


def random_program(random: Random, factor: int = 1) -> Program:
    """Return a graph and inputs; each node takes any earlier values whose shapes allow it.

    Args:
        random: Where all choices come from.
        factor: How many times larger most sizes are.
    """
    torch.manual_seed(random.randrange(2**20))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deviations of one element
        return _Writer(random, factor).program()


class _Writer:
    def __init__(self, random: Random, factor: int) -> None:
        self._random = random
        self._factor = factor
        self._graph = fx.Graph()
        self._originals: list[torch.Tensor] = []
        self._values: list[tuple[Any, torch.Tensor]] = []
        self._steps = {
            self._unary: 3, self._binary: 5, self._reduction: 1, self._softmax: 1, self._shape: 2,
            self._choice: 1, self._move: 5, self._join: 2, self._cast: 1, self._embedding: 1,
            self._scalar: 2, self._scan: 0.5, self._layer: 2, self._product_and_more: 1,
            self._several: 0.7, self._other: 1.5, self._write: 1, self._write_part: 0.5,
            self._many_axes: 0.5, self._sums_over_rows: 0.7,
        }  # fmt: skip

    def program(self) -> Program:
        for _ in range(3):
            shapes = EMPTY_SHAPES if self._random.random() < 0.04 else SHAPES
            shape = self._random.choice(shapes)
            grown = tuple(n * self._factor if n >= LEAST_TO_GROW else n for n in shape)
            self._input(self._made(grown), is_operand=True)
        kinds = list(self._steps)
        weights = list(self._steps.values())
        for _ in range(self._random.randint(3, 14)):
            self._random.choices(kinds, weights)[0]()
        made = [node for node, _ in self._values if node.op != "placeholder"]
        outputs = [node for node in made if self._random.random() < 0.4] or made[-1:]
        self._graph.output(tuple(outputs))
        return fx.GraphModule(nn.Module(), self._graph), tuple(self._originals)

    def _made(self, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = self._random.choice(DTYPES)
        values = torch.randn(shape).mul(3)
        return (values.abs() if dtype == torch.uint8 else values).to(dtype)

    def _input(self, tensor: torch.Tensor, is_operand: bool = False) -> fx.Node:
        last = next((n for n in self._graph.nodes if n.op != "placeholder"), None)
        where = self._graph.inserting_before(last) if last else self._graph.inserting_after(None)
        with where:
            node = self._graph.placeholder(f"x{len(self._originals)}")
        self._originals.append(tensor.clone())
        if is_operand:
            self._values.append((node, tensor))
        return node

    def _apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function of values, numbers and new inputs, if eager does and it is not large."""
        nodes: dict[int, Any] = {id(tensor): node for node, tensor in self._values}

        def node_of(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(node_of, value))
            if not isinstance(value, torch.Tensor):
                return value
            return nodes[id(value)] if id(value) in nodes else self._input(value)

        before = self._versions()
        try:
            result = function(*args, **kwargs)
        except REFUSALS:
            if before != self._versions():  # it has failed half-way
                raise
            return
        is_write = before != self._versions()
        if not is_write and not self._is_kept(result, args[0]):
            return
        named = {key: node_of(value) for key, value in kwargs.items()}
        node = self._graph.call_function(function, tuple(map(node_of, args)), named)
        if isinstance(result, torch.Tensor):
            self._values.append((node, result))
        elif isinstance(result, (tuple, list)):
            for place, part in enumerate(result[:3]):
                self._values.append(
                    (self._graph.call_function(operator.getitem, (node, place)), part)
                )

    def _versions(self) -> list[int]:
        return [tensor._version for _, tensor in self._values]

    def _is_kept(self, result: Any, x: torch.Tensor) -> bool:
        most = MOST_ELEMENTS * self._factor**2
        parts = [result] if isinstance(result, torch.Tensor) else result
        return all(part.numel() <= most and part is not x for part in parts)

    def _any(self, rank: int = 0) -> torch.Tensor | None:
        """Return one of the values that have so many dimensions, the later the likelier."""
        found = [t for _, t in self._values if t.dim() >= rank]
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

    def _scalar(self) -> None:
        x = self._any()
        if x is not None:
            self._apply(self._random.choice(SCALAR), x, self._random.choice([2, 0.5, -3, 1.25]))

    def _reduction(self) -> None:
        x = self._any(1)
        if x is not None:
            keepdim = self._random.random() < 0.5
            function = self._random.choice(REDUCTIONS)
            self._apply(function, x, dim=self._dim(x), keepdim=keepdim)

    def _many_axes(self) -> None:
        x = self._any(2)
        if x is not None:
            dims = sorted(self._random.sample(range(x.dim()), self._random.randint(2, x.dim())))
            function = self._random.choice([torch.mean, torch.sum, torch.amax, torch.var])
            self._apply(function, x, dim=dims, keepdim=self._random.random() < 0.5)

    def _sums_over_rows(self) -> None:
        """Add sums over all rows of what is as large as a value, beside reductions of its rows."""
        x, y = self._any(2), self._any()
        if x is None or y is None or not _broadcast(x, y) or y.dim() > x.dim():
            return
        if self._random.random() < 0.7:
            self._apply(torch.mul, x, y)
        rows = self._values[-1][1]
        if rows.shape == x.shape and rows.is_floating_point():
            self._apply(self._random.choice([F.softmax, F.log_softmax]), rows, dim=-1)
        count = len(self._values)
        self._apply(torch.Tensor.expand, y, x.shape)
        if len(self._values) > count:
            self._apply(torch.sum, self._values[-1][1], dim=list(range(x.dim() - 1)))

    def _scan(self) -> None:
        x = self._any(1)
        if x is not None:
            self._apply(self._random.choice(SCANS), x, self._dim(x))

    def _softmax(self) -> None:
        x = self._any(1)
        if x is not None and x.is_floating_point():
            function = self._random.choice([F.softmax, F.log_softmax])
            self._apply(function, x, dim=self._dim(x))

    def _layer(self) -> None:
        kinds = {layers.norms: 1, layers.products: 1, layers.attentions: 3, layers.pools: 3}
        make = self._random.choices(list(kinds), [3, 3, 2, 2])[0]
        x = self._any(kinds[make])
        if x is not None and x.is_floating_point() and x.numel():
            self._call(make, x)

    def _product_and_more(self) -> None:
        """Add a product with what may become part of its kernel."""
        x = self._any(1)
        if x is None or not x.is_floating_point() or not x.numel():
            return
        count = len(self._values)
        self._call(layers.products, x)
        for _ in range(self._random.randint(1, 3)):
            if len(self._values) == count:
                return
            product = self._values[-1][1]
            if self._random.random() < 0.5:
                self._apply(self._random.choice(layers.ACTIVATIONS), product)
            else:
                shape = product.shape[-1:] if self._random.random() < 0.5 else product.shape
                other = torch.randn(shape).to(product.dtype)
                self._apply(self._random.choice([torch.add, torch.mul]), product, other)

    def _several(self) -> None:
        x = self._any(1)
        if x is not None and x.numel():
            self._call(layers.several, x)

    def _other(self) -> None:
        x = self._any(1)
        if x is not None and x.numel():
            self._call(layers.others, x)

    def _write_part(self) -> None:
        x = self._any(1)
        if x is not None and x.numel() and _may_be_written(x, x):
            self._call(layers.writes, x)

    def _call(self, make: Callable[..., list[layers.Call]], x: torch.Tensor) -> None:
        function, args, kwargs = self._random.choice(make(self._random, x))
        self._apply(function, x, *args, **kwargs)

    def _write(self) -> None:
        """Change a value, and with it whatever shows the same memory."""
        x, y = self._any(), self._any()
        if x is None or y is None or y.dtype != x.dtype or not _may_be_written(x, y):
            return
        if self._random.random() < 0.3 and x.is_floating_point():
            self._apply(self._random.choice(IN_PLACE_ALONE), x)
        elif _broadcast(x, y) and y.dim() <= x.dim():
            self._apply(self._random.choice(IN_PLACE), x, y)

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
            wider = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
            dtype = self._random.choice(wider)
            self._apply(torch.Tensor.to, x, dtype)

    def _embedding(self) -> None:
        x = self._any(2)
        if x is not None and x.dim() == 2 and x.shape[0]:
            shape = self._random.choice([(4,), (2, 3), (1, 7)])
            self._apply(F.embedding, torch.randint(0, x.shape[0], shape), x)

    def _join(self) -> None:
        x = self._any(1)
        if x is None:
            return
        dim = self._dim(x)
        others = [t for _, t in self._values if t.dim() == x.dim()]
        alike = [t for t in others if t.shape == x.shape and t.dtype == x.dtype]
        fitting = [t for t in others if _without(t.shape, dim) == _without(x.shape, dim)]
        is_stack = self._random.random() < 0.5
        chosen = self._random.choices(alike if is_stack else fitting, k=self._random.randint(1, 3))
        self._apply(torch.stack if is_stack else torch.cat, chosen, dim=dim)

    def _move(self) -> None:
        x = self._any(1)
        if x is not None:
            function, args = self._random.choice(self._moves(x))
            self._apply(function, x, *args)

    def _moves(self, x: torch.Tensor) -> list[Move]:
        """Return operators that move the elements of a tensor, each with its other arguments."""
        dim = self._dim(x)
        size = x.shape[dim]
        if not x.numel():
            return [(torch.flip, ([dim],)), (torch.flatten, ()), (torch.movedim, (dim, 0))]
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


def _without(shape: torch.Size, dim: int) -> list[int]:
    kept = list(shape)
    kept.pop(dim)
    return kept


def _may_be_written(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Tell whether each element of a value has memory of its own, and another value reads none."""
    if y is not x and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
        return False
    places = torch.arange(x.untyped_storage().nbytes() // x.itemsize)
    return places.as_strided(x.shape, x.stride(), x.storage_offset()).unique().numel() == x.numel()


def _broadcast(x: torch.Tensor, y: torch.Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def results_of(gm: fx.GraphModule) -> list[Any]:
    """Return the nodes of a program's results."""
    output = next(iter(reversed(gm.graph.nodes)))
    return list(output.all_input_nodes)


def together(programs: list[Program]) -> Program:
    """Return many programs as one, so that the compiler is started once."""
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []
    values: list[dict[fx.Node, fx.Node]] = []
    for gm, own in programs:
        named: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            named[node] = graph.placeholder(f"x{len(inputs) + len(named)}")
        inputs += own
        values.append(named)
    results: list[fx.Node] = []
    for (gm, _), named in zip(programs, values, strict=True):
        for node in gm.graph.nodes:
            if node.op == "call_function":
                named[node] = graph.node_copy(node, named.__getitem__)
        results += [named[node] for node in results_of(gm)]
    graph.output(tuple(results))
    return fx.GraphModule(nn.Module(), graph), tuple(inputs)
