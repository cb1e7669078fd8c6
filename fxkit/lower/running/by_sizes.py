"""Run a graph whose sizes are free through modules that are each lowered for some sizes."""

from __future__ import annotations

import math
import operator
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.types import TensorType, type_of

# Sets of sizes that are lowered when they first come. Later ones may never come again: they are
# lowered at their third call, and until then the graph runs as it was captured.
AT_ONCE = 16
CALLS_TO_LOWER = 3

# Sets of sizes that are lowered at all, and that are counted.
MAX_LOWERED = 256
_MAX_COUNTED = 4096

Lower = Callable[[fx.GraphModule, tuple[Any, ...]], Callable[..., Any]]

_SIZES = frozenset(
    {
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_numel.default,
    }
)
_ARITHMETIC = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.pow),
        *(operator.truediv, operator.neg, operator.eq, operator.ne, operator.lt, operator.le),
        *(operator.gt, operator.ge, math.ceil, math.floor),
    }
)


def has_free_sizes(gm: fx.GraphModule) -> bool:
    """Tell whether the types of a graph's inputs hold expressions."""
    types = (type_of(node) for node in gm.graph.nodes if node.op == "placeholder")
    return any(isinstance(known, TensorType) and known.is_symbolic for known in types)


def specialise(gm: fx.GraphModule, args: tuple[Any, ...]) -> fx.GraphModule:
    """Return a copy of a graph with the numbers in it that follow from the sizes of some inputs.

    Args:
        gm: The graph; it is left as it is.
        args: The inputs.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    module = fx.GraphModule(gm, graph)
    propagate_types(module, args)
    numbers: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node.op == "output" or not numbers:
            pass
        elif any(operand in numbers for operand in node.all_input_nodes):
            node.args = fx.map_arg(node.args, lambda n: numbers.get(n, n))
            node.kwargs = fx.map_arg(node.kwargs, lambda n: numbers.get(n, n))
        if _is_number(node):
            numbers[node] = type_of(node)
    _return_numbers(graph, numbers)
    for node in reversed(numbers):
        graph.erase_node(node)
    module.recompile()
    return module


def _is_number(node: fx.Node) -> bool:
    if node.op != "call_function" or type(type_of(node)) not in (int, float, bool):
        return False
    return node.target in _SIZES or (node.target in _ARITHMETIC and not node.all_input_nodes)


def _return_numbers(graph: fx.Graph, numbers: dict[fx.Node, Any]) -> None:
    output = next(reversed(graph.nodes))
    output.args = fx.map_arg(output.args, lambda node: numbers.get(node, node))


class BySizes:
    """Callable like a graph of free sizes; lowers it for each set of sizes that it is called with.

    Lowering for further sizes plans the graph again, which takes Python milliseconds; what is built
    for the first ones serves them, where `lower` sees to that.

    Args:
        gm: The graph.
        lower: Makes of a graph for certain sizes, and of inputs, what runs in its place.
    """

    def __init__(self, gm: fx.GraphModule, lower: Lower) -> None:
        self.graph_module = gm
        self._lower = lower
        self._made: dict[Any, Callable[..., Any]] = {}
        self._calls: Counter[Any] = Counter()
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        key = _key(args)
        run = self._made.get(key)
        if run is None:
            run = self._make(key, args)
        return run(*args)

    def module_for(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return what runs in place of the graph for the sizes of some inputs, if it is made."""
        return self._made.get(_key(args))

    def prepare(self, *args: Any) -> None:
        """Lower the graph for the sizes of some inputs, without running it."""
        self._make(_key(args), args)

    def _make(self, key: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        with self._lock:
            if key not in self._made:
                if not self._is_due(key):
                    return self.graph_module.forward
                self._made[key] = self._lower(specialise(self.graph_module, args), args)
            return self._made[key]

    def _is_due(self, key: Any) -> bool:
        """Count a call with sizes that are not lowered; tell whether they are to be now."""
        if len(self._made) < AT_ONCE:
            return True
        if len(self._calls) >= _MAX_COUNTED:
            self._calls.clear()
        self._calls[key] += 1
        return self._calls[key] >= CALLS_TO_LOWER and len(self._made) < MAX_LOWERED


def _key(args: tuple[Any, ...]) -> Any:
    """Return what a graph is lowered for; the strides of a sparse tensor can't be read."""
    dense = torch.strided
    return tuple([(arg.shape, arg.stride() if arg.layout is dense else None) for arg in args])
