"""The Python steps between runs of kernels, and the values that pass between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from fxkit.lower.families.integer_convolutions import innermost_weight
from fxkit.lower.library_calls import packed_convolution as packed
from fxkit.lower.runtime.boxed_function import boxed_function
from fxkit.lower.runtime.kernel_call import KernelCall

# A node, and which of its results.
Key = tuple[fx.Node, int]


def kernel_of(value: Any) -> KernelCall | None:
    """Return the built kernel that a node calls, or None."""
    if not isinstance(value, fx.Node) or not isinstance(value.target, KernelCall):
        return None
    return value.target if value.target.address is not None else None


def is_one_of_several(node: fx.Node) -> bool:
    """Tell whether a node names one of several results of a kernel."""
    call = kernel_of(node.args[0]) if node.target is operator.getitem else None
    return call is not None and len(call.outputs) > 1


def key_of(node: fx.Node) -> Key:
    """Return the value that a node stands for: one of a kernel's results, or its own."""
    if is_one_of_several(node):
        source, number = node.args
        if isinstance(source, fx.Node) and isinstance(number, int):
            return source, number
    return node, 0


def results_of(node: fx.Node) -> list[Key]:
    """Return the values that a node makes."""
    call = kernel_of(node)
    return [(node, number) for number in range(len(call.outputs) if call is not None else 1)]


class Piece:
    """Consecutive nodes of a graph as a function of Python, compiled when it is first needed.

    It is called with the module that owns the attributes and a list of operands, which it empties:
    so each operand is let go of after its last use. It returns a tuple.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        nodes: Iterable[fx.Node],
        ins: list[Key],
        outs: list[Key],
        views: dict[fx.Node, fx.Node],
    ) -> None:
        self._gm = gm
        self._nodes = list(nodes)
        self._ins = ins
        self._outs = outs
        self._views = views
        self._run: Callable[..., Any] | None = None

    def __call__(self, owner: fx.GraphModule, box: list[Any]) -> Any:
        return (self._run or self.prepare())(owner, box)

    def prepare(self) -> Callable[..., Any]:
        """Compile the function."""
        self._run = boxed_function(self._graph())
        return self._run

    def _graph(self) -> fx.Graph:
        graph = fx.Graph(self._gm)
        values: dict[Key, fx.Node] = {}
        for number, key in enumerate(self._ins):
            values[key] = graph.placeholder(f"operand_{number}")

        def value(node: fx.Node) -> fx.Node:
            if node in self._views:
                return graph.node_copy(node, value)
            key = key_of(node)
            if key not in values and node.op == "get_attr":
                values[key] = graph.node_copy(node)
            return values[key]

        for node in self._nodes:
            if node.op == "output":
                graph.output((fx.map_arg(node.args[0], value),))
                return graph
            copied = graph.node_copy(node, value)
            copied.target = innermost_weight.without_dispatcher(copied.target)
            copied.target = packed.without_dispatcher(copied.target)
            call = kernel_of(node)
            if call is None or len(call.outputs) == 1:
                values[node, 0] = copied
                continue
            for key in results_of(node):
                values[key] = graph.call_function(operator.getitem, (copied, key[1]))
        graph.output(tuple(values[key] for key in self._outs))
        return graph
