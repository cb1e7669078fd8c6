"""A graph as a Python function with a clock between its statements.

An interpreter costs about 7 µs a node, which hides small operators. Here the graph is written as
straight-line code, as `GraphModule` does, and reading the clock costs less than 0.1 µs a node. A
value is dropped right after its last use, and that time is part of the node that used it last.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.liveness import Liveness
from fxkit.errors import UnsupportedError
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fx_graphs import codegen_of

Observer = Callable[[int, Any], None]

_PLAIN = (bool, int, float, str, type(None), type(Ellipsis))


@dataclass(frozen=True)
class Instrumented:
    """What `instrument` returns.

    Attributes:
        nodes: The nodes in the order they run.
        timed: Takes the graph's inputs; returns its output and what the clock said, first before
            the first node and last after the last one.
        spans: For each node that is timed the positions of its two readings of the clock.
        observed: Takes an observer and the graph's inputs; calls it after each node with the
            node's position and value, and with None for values that are dropped there.
        source: The text of `timed`.
    """

    nodes: tuple[fx.Node, ...]
    timed: Callable[..., tuple[Any, tuple[Any, ...]]]
    spans: Mapping[int, tuple[int, int]]
    observed: Callable[..., Any]
    source: str


def instrument(
    gm: fx.GraphModule,
    *,
    clock: Callable[[], Any] = time.perf_counter_ns,
    only: Collection[int] | None = None,
) -> Instrumented:
    """Write a graph as timed code; the graph module is not changed.

    Args:
        gm: The graph.
        clock: What is called between the statements.
        only: Positions of the nodes to time; all when left out.
    """
    nodes = tuple(gm.graph.nodes)
    wanted = range(len(nodes)) if only is None else only
    writer = _Writer(gm, nodes, clock, wanted)
    timed, source = writer.compile("timed")
    observed, _ = writer.compile("observed")
    return Instrumented(nodes, timed, writer.spans, observed, source)


def graph_inputs(
    gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> list[Any]:
    """Return the values of a graph's placeholders for a call of its module.

    Raises:
        UnsupportedError: The arguments don't fit the placeholders.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    info = getattr(codegen_of(gm.graph), "pytree_info", None)
    if info is not None:
        names = list(info.orig_args)[len(args) :]
        ordered = {name: (kwargs or {})[name] for name in names if name in (kwargs or {})}
        values = pytree.tree_leaves((args, ordered))
    else:
        values = _bound(placeholders, args, dict(kwargs or {}))
    if len(values) != len(placeholders):
        raise UnsupportedError(
            f"expected {len(placeholders)} inputs, got {len(values)}",
            hint=f"the graph's inputs are {', '.join(str(p.target) for p in placeholders)}",
        )
    return values


def _bound(placeholders: list[fx.Node], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    values = list(args)
    for node in placeholders[len(args) :]:
        name = str(node.target)
        if name.startswith("*"):
            continue
        if name in kwargs:
            values.append(kwargs.pop(name))
        elif node.args:
            values.append(node.args[0])
    return [*values, *kwargs.values()]


class _Writer:
    """Writes the statements of a graph, and the names that they refer to."""

    def __init__(
        self,
        gm: fx.GraphModule,
        nodes: tuple[fx.Node, ...],
        clock: Callable[[], Any],
        wanted: Collection[int],
    ) -> None:
        self._gm = gm
        self._stamped = _stamped(len(nodes), wanted)
        self.spans = {i: (self._stamped[i], self._stamped[i + 1]) for i in wanted}
        self._nodes = nodes
        self._names = {node: f"v{i}" for i, node in enumerate(nodes)}
        self._liveness = Liveness(gm.graph)
        self._globals: dict[str, Any] = {"clock": clock, "root": gm}
        self._known: dict[int, str] = {}

    def compile(self, kind: str) -> tuple[Callable[..., Any], str]:
        """Return the function of this kind, and its text."""
        source = "\n".join(self._lines(kind)) + "\n"
        file = f"<fxkit {kind} {id(self):x}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        names = dict(self._globals)
        exec(compile(source, file, "exec"), names)
        return names[kind], source

    def _lines(self, kind: str) -> Iterator[str]:
        inputs = [self._names[n] for n in self._nodes if n.op == "placeholder"]
        first = ["see"] if kind == "observed" else []
        yield f"def {kind}({', '.join([*first, *inputs])}):"
        if kind == "timed":
            yield "    t0 = clock()"
        for i, node in enumerate(self._nodes):
            if node.op != "placeholder":
                yield f"    v{i} = {self._expression(node)}"
            if kind == "observed":
                yield f"    see({i}, v{i})"
            dead = [n for n in self._liveness.dying_at(node) if node.op != "output"]
            if dead:
                yield f"    {' = '.join(self._names[n] for n in dead)} = None"
            if kind == "timed" and i + 1 in self._stamped:
                yield f"    t{self._stamped[i + 1]} = clock()"
        result = next((self._names[n] for n in self._nodes if n.op == "output"), "None")
        stamps = "".join(f"t{i}, " for i in range(len(self._stamped)))
        yield f"    return {result}, ({stamps})" if kind == "timed" else f"    return {result}"

    def _expression(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if node.op == "output":
            return self._value(node.args[0])
        if node.op == "call_method":
            receiver, *rest = node.args
            return f"{self._value(receiver)}.{node.target}({self._arguments(rest, node.kwargs)})"
        if node.op == "call_module":
            callee = self._attribute(str(node.target))
        else:
            callee = self._global(node.target)
        return f"{callee}({self._arguments(node.args, node.kwargs)})"

    def _attribute(self, path: str) -> str:
        text = "root"
        for part in path.split("."):
            text = f"{text}.{part}" if part.isidentifier() else f"getattr({text}, {part!r})"
        return text

    def _arguments(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        positional = [self._value(arg) for arg in args]
        named = [f"**{{{key!r}: {self._value(arg)}}}" for key, arg in kwargs.items()]
        return ", ".join([*positional, *named])

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if type(value) in _PLAIN and value == value and value not in (float("inf"), -float("inf")):
            return repr(value)
        if type(value) is tuple:
            return f"({''.join(self._value(item) + ', ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self._value(item) for item in value)}]"
        if isinstance(value, dict):
            items = (f"{self._value(key)}: {self._value(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            return (
                f"slice({', '.join(self._value(v) for v in (value.start, value.stop, value.step))})"
            )
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._global(type(value))}({', '.join(self._value(item) for item in value)})"
        return self._global(value)

    def _global(self, value: Any) -> str:
        if id(value) not in self._known:
            name = f"g{len(self._known)}"
            self._known[id(value)] = name
            self._globals[name] = value
        return self._known[id(value)]


def _stamped(count: int, wanted: Collection[int]) -> dict[int, int]:
    """Number the places where the clock is read: 0 lies before all nodes, i + 1 behind node i."""
    places = {0, count}.union(*((i, i + 1) for i in wanted))
    return {place: number for number, place in enumerate(sorted(places))}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
