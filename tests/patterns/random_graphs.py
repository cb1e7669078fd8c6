"""Random graphs with views, writes and random numbers, made so that rules find something in them.

A graph is a list of `Step`; each step names a kind of instruction and picks its operands among the
values made last. The kinds come in pairs that rules look for, and whatever lies between the two
halves, a write most of all, is what a careless rewriter gets wrong.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import fx

SHAPE = (3, 4)
RECENT = 4


@dataclass(frozen=True)
class Step:
    """One instruction: its kind, and which of the latest values it takes, 0 for the last."""

    kind: str
    first: int
    second: int


class _Builder:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.root.register_buffer("state", torch.linspace(-2.0, 2.0, 12).reshape(SHAPE))
        self.values = [self.graph.placeholder("x"), self.graph.placeholder("y")]
        self.values.append(self.graph.get_attr("state"))

    def function(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_method(name, args, kwargs)


def _pure(*targets: Any) -> Callable[..., fx.Node]:
    return lambda b, x, y: b.function(targets[0], x, *targets[1:])


def _method(name: str, *args: Any) -> Callable[..., fx.Node]:
    return lambda b, x, y: b.method(name, x, *args)


_PURE: dict[str, Callable[..., fx.Node]] = {
    "neg": _pure(operator.neg),
    "neg method": _method("neg"),
    "relu": _pure(F.relu),
    "relu method": _method("relu"),
    "abs": _pure(torch.abs),
    "square": _method("square"),
    "times one": _pure(operator.mul, 1.0),
    "one times": lambda b, x, y: b.function(torch.mul, 1, x),
    "minus zero": _pure(torch.sub, 0),
    "over one": _pure(operator.truediv, 1),
    "first power": _pure(operator.pow, 1),
    "sigmoid": _pure(torch.sigmoid),
    "product": lambda b, x, y: b.function(operator.mul, x, y),
    "sum": lambda b, x, y: b.function(torch.add, x, y),
    "erf part": lambda b, x, y: b.function(
        operator.add, b.function(torch.erf, b.function(operator.truediv, x, 2**0.5)), 1
    ),
    "half": _pure(operator.mul, 0.5),
    "exp of neg": lambda b, x, y: b.function(torch.exp, b.function(operator.neg, x)),
    "over one more": lambda b, x, y: b.function(
        operator.truediv, 1, b.function(operator.add, 1, x)
    ),
    "clone": _method("clone"),
    "cat": lambda b, x, y: b.function(operator.getitem, b.function(torch.cat, [x, y]), slice(0, 3)),
}
_VIEWS: dict[str, Callable[..., fx.Node]] = {
    "transpose": lambda b, x, y: b.method("transpose", b.method("transpose", x, 0, 1), 0, 1),
    "reshape": _method("reshape", *SHAPE),
    "view": _method("view", SHAPE),
    "contiguous": _method("contiguous"),
    "expand": _method("expand", *SHAPE),
    "axis and back": lambda b, x, y: b.method("squeeze", b.method("unsqueeze", x, 0), 0),
    "eval dropout": lambda b, x, y: b.function(F.dropout, x, 0.3, False),
    "cast to same": _method("to", torch.float32),
    "slice": _pure(operator.getitem, slice(None)),
    "chunk": lambda b, x, y: b.function(operator.getitem, b.method("split", x, 3), 0),
}
_EFFECTS: dict[str, Callable[..., fx.Node | None]] = {
    "add_": lambda b, x, y: b.method("add_", x, y),
    "mul_": _method("mul_", -0.5),
    "neg_": _method("neg_"),
    "relu inplace": lambda b, x, y: b.function(F.relu, x, inplace=True),
    "copy_": lambda b, x, y: b.method("copy_", x, y),
    "out": lambda b, x, y: b.function(torch.add, x, 1.0, out=y),
    "set row": lambda b, x, y: _none(b.function(operator.setitem, x, 0, 1.5)),
    "set column": lambda b, x, y: _none(b.function(operator.setitem, x, (slice(None), 1), -2.0)),
    "fill row": lambda b, x, y: _none(b.method("fill_", b.function(operator.getitem, x, 1), 3.0)),
    "dropout": lambda b, x, y: b.function(F.dropout, x, 0.5, True),
    "noise": _pure(torch.rand_like),
    "noise on noise": lambda b, x, y: b.function(
        torch.add, b.function(torch.rand_like, x), b.function(torch.rand_like, y)
    ),
}
KINDS: dict[str, Callable[..., fx.Node | None]] = {**_PURE, **_VIEWS, **_EFFECTS}


def _none(_: fx.Node) -> None:
    """Make a node that only has an effect and whose value nobody takes."""


def build(steps: Sequence[Step], results: Sequence[int], as_tuple: bool) -> fx.GraphModule:
    """Return the graph of `steps`; `results` pick what it returns."""
    builder = _Builder()
    for step in steps:
        latest = builder.values[: -RECENT - 1 : -1]
        made = KINDS[step.kind](
            builder, latest[step.first % len(latest)], latest[step.second % len(latest)]
        )
        if made is not None:
            builder.values.append(made)
    picked = [builder.values[-1 - index % len(builder.values)] for index in results]
    builder.graph.output(tuple(picked) if as_tuple else picked[0])
    return fx.GraphModule(builder.root, builder.graph)


_INDEX = st.integers(0, RECENT - 1)
_STEP = st.builds(Step, st.sampled_from(sorted(KINDS)), _INDEX, _INDEX)
# Two halves that a rule looks for, with anything between, a write to what the first took above all.
_HALVES = st.sampled_from(
    [*((kind, kind) for kind in ("neg", "relu", "abs", "times one", "transpose")),
     ("sigmoid", "product"), ("noise", "sum"), ("neg", "relu"), ("exp of neg", "over one more")]
)  # fmt: skip
_BETWEEN = st.one_of(
    _STEP, st.builds(Step, st.sampled_from(sorted(_EFFECTS)), st.integers(0, 1), _INDEX)
)
_REPEATED = st.tuples(_HALVES, st.lists(_BETWEEN, max_size=2), st.integers(0, 2), _INDEX).map(
    lambda drawn: [Step(drawn[0][0], 0, 0), *drawn[1], Step(drawn[0][1], drawn[2], drawn[3])]
)
_SPAN = st.one_of(_STEP.map(lambda step: [step]), _REPEATED)
GRAPHS = st.builds(
    build,
    st.lists(_SPAN, min_size=1, max_size=8).map(lambda spans: [s for span in spans for s in span]),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.booleans(),
)


@dataclass(frozen=True)
class Observation:
    """All that a caller can see of one run."""

    values: list[torch.Tensor]
    strides: list[tuple[int, ...]]
    shared: list[list[bool]]
    random: torch.Tensor
    writes_input: bool


def observe(gm: fx.GraphModule, *, transposed: bool, same: bool) -> Observation:
    """Run a copy of a graph from `build`, and look at results, arguments, buffer and generator."""
    gm = copy.deepcopy(gm)
    torch.manual_seed(1)
    x = torch.randn(SHAPE[::-1]).t() if transposed else torch.randn(SHAPE)
    y = x if same else torch.randn(SHAPE)
    versions = x._version, y._version
    returned = gm(x, y)
    results = list(returned) if isinstance(returned, tuple) else [returned]
    seen = [*results, x, y, gm.get_buffer("state")]
    storages = [tensor.untyped_storage()._cdata for tensor in seen]
    return Observation(
        values=seen,
        strides=[tensor.stride() for tensor in seen],
        shared=[[a == b for a in storages] for b in storages],
        random=torch.rand(1),
        writes_input=versions != (x._version, y._version),
    )


def difference(expected: Observation, got: Observation) -> str | None:
    """Return in what two runs differ, or None."""
    for index, (e, g) in enumerate(zip(expected.values, got.values, strict=True)):
        if not torch.allclose(e, g, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"value {index}"
    if expected.strides != got.strides:
        return "strides"
    if expected.shared != got.shared:
        return "shared memory"
    return None if torch.equal(expected.random, got.random) else "random numbers"
