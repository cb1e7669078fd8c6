"""Mode `partial`: the graphs that Dynamo finds in a program, and one view over them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxkit.errors import CaptureError
from fxkit.ir.op import OPERATOR_NAME
from fxkit.torch_adapters import pytree


@dataclass(frozen=True, slots=True)
class Break:
    """Why a graph ends where it does.

    Attributes:
        reason: What Dynamo could not follow, in its words.
        source: The user's line, `file:line in function`; None where Dynamo does not say.
    """

    reason: str
    source: str | None

    def __str__(self) -> str:
        return f"{self.reason}\n  from:  {self.source}" if self.source else self.reason


@dataclass(slots=True)
class _Call:
    """One run of one graph: the tensors that went in and came out."""

    number: int
    inputs: tuple[Any, ...]
    results: tuple[Any, ...]


def python_between(*values: Any) -> Any:
    """Stand for what Python does between two graphs; a view of graphs in pieces is not run.

    Raises:
        CaptureError: When it is called.
    """
    raise CaptureError(
        "expected a view to be looked at, got a call of it", hint="call the captured program"
    )


setattr(python_between, OPERATOR_NAME, "python.between_graphs")


class Partial:
    """A program in pieces; made by `capture(mode="partial")`.

    Dynamo finds the graphs: those that `torch.compile(fn, backend="fxkit")` would compile. What it
    can't follow runs in Python between them, so that the program stays what it is.

    Args:
        fn: The program.
        dynamic: Whether sizes are free; as `torch.compile` takes it.

    Attributes:
        fn: The program.
        graphs: The graphs, in the order in which they were found.
        breaks: Why the program is in pieces; one for each graph that ends early.
    """

    def __init__(self, fn: Callable[..., Any], *, dynamic: bool | None = None) -> None:
        self.fn = fn
        self.graphs: list[fx.GraphModule] = []
        self.breaks: list[Break] = []
        self._calls: list[_Call] = []
        self._is_watching = False
        self._compiled = torch.compile(fn, backend=self._take, dynamic=dynamic)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program: its graphs, and Python between them."""
        return self._compiled(*args, **kwargs)

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program, and note which tensors go from graph to graph."""
        self._calls = []
        self._is_watching = True
        try:
            return self(*args, **kwargs)
        finally:
            self._is_watching = False

    @property
    def whole(self) -> bool:
        """Whether there is one graph and no break."""
        return len(self.graphs) == 1 and not self.breaks

    @property
    def graph_module(self) -> fx.GraphModule:
        """One view over all graphs, in the order in which they ran at capture.

        Where a tensor goes from one graph into another, so it does here. What Python computed
        between two graphs is a call of `python_between` on the results of those before it; its
        reason is in the node's `meta["fxkit_break"]`. The view is for looking at: it does not run.
        """
        return _Stitching(self.graphs, self.breaks).view(self._calls)

    def explain(self) -> str:
        """Say how many graphs there are, and why they end where they do."""
        count = len(self.graphs)
        head = f"{count} graph{'' if count == 1 else 's'}, {len(self.breaks)} breaks"
        return "\n".join([head, *map(str, self.breaks)])

    def _take(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        del example_inputs
        number = len(self.graphs)
        self.graphs.append(gm)
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            self.breaks.append(_break(reason))

        def run(*inputs: Any) -> Any:
            results = gm(*inputs)
            if self._is_watching:
                self._calls.append(_Call(number, inputs, tuple(pytree.tree_leaves(results))))
            return results

        return run


def capture_partially(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Any = None
) -> Partial:
    """Let Dynamo find the graphs of a program, by one run of it."""
    partial = Partial(fn, dynamic=dynamic)
    partial.watch(args, kwargs)
    return partial


def _break(reason: Any) -> Break:
    lines = str(reason.reason).strip().splitlines()
    stack = reason.user_stack
    source = None
    if stack:
        frame = stack[-1]
        name = re.sub(r"^torch_dynamo_resume_in_(.+)_at_\d+$", r"\1", frame.name)
        source = f"{Path(frame.filename).name}:{frame.lineno} in {name}"
    return Break(" ".join(line.strip() for line in lines[:2]), source)


class _Stitching:
    def __init__(self, graphs: list[fx.GraphModule], breaks: list[Break]) -> None:
        self._graphs = graphs
        self._breaks = breaks
        self._graph = fx.Graph()
        self._root = torch.nn.Module()
        self._values: dict[int, fx.Node] = {}
        self._keep: list[Any] = []
        self._last: list[fx.Node] = []

    def view(self, calls: list[_Call]) -> fx.GraphModule:
        inputs = self._inputs(calls)
        for order, call in enumerate(calls):
            self._append(call, order, inputs)
        self._graph.output(tuple(self._last))
        return fx.GraphModule(self._root, self._graph)

    def _inputs(self, calls: list[_Call]) -> set[int]:
        """Make a placeholder for each tensor that no graph has computed."""
        made: set[int] = set()
        found: set[int] = set()
        for order, call in enumerate(calls):
            names = self._graphs[call.number].graph.find_nodes(op="placeholder")
            for name, value in zip(names, call.inputs, strict=False):
                is_known = id(value) in made or id(value) in found
                is_first = order == 0 or isinstance(value, torch.nn.Parameter)
                if is_first and not is_known:
                    found.add(id(value))
                    self._values[id(value)] = self._placeholder(name)
            made.update(id(value) for value in call.results)
            self._keep.append(call)
        return found

    def _placeholder(self, node: fx.Node) -> fx.Node:
        placeholder = self._graph.placeholder(node.name)
        placeholder.meta.update(node.meta)
        return placeholder

    def _append(self, call: _Call, order: int, inputs: set[int]) -> None:
        gm = self._graphs[call.number]
        between: fx.Node | None = None
        env: dict[fx.Node, fx.Node] = {}
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), call.inputs, strict=False):
            if id(value) not in self._values:
                if between is None:
                    between = self._between(order)
                position = len(env)
                taken = self._graph.call_function(operator.getitem, (between, position))
                taken.meta.update(node.meta)
                self._values[id(value)] = taken
            env[node] = self._values[id(value)]
        if order and between is None:
            self._between(order)
        for node in gm.graph.nodes:
            if node.op == "output":
                self._finish(call, env, node)
            elif node.op != "placeholder":
                env[node] = self._graph.node_copy(node, env.__getitem__)
                self._take_attribute(gm, env[node])

    def _between(self, order: int) -> fx.Node:
        node = self._graph.call_function(python_between, tuple(self._last), name="python")
        if order - 1 < len(self._breaks):
            node.meta["fxkit_break"] = self._breaks[order - 1]
        return node

    def _take_attribute(self, gm: fx.GraphModule, node: fx.Node) -> None:
        """Put what a node reads or calls into the view's own root."""
        if node.op not in ("get_attr", "call_module"):
            return
        name = f"graph_{self._graphs.index(gm)}_{str(node.target).replace('.', '_')}"
        value: Any = gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        setattr(self._root, name, value)
        node.target = name

    def _finish(self, call: _Call, env: dict[fx.Node, fx.Node], output: fx.Node) -> None:
        leaves = pytree.tree_leaves(output.args[0])
        self._last = [env[leaf] for leaf in leaves if isinstance(leaf, fx.Node)]
        for leaf, value in zip(leaves, call.results, strict=False):
            if isinstance(leaf, fx.Node):
                self._values[id(value)] = env[leaf]
