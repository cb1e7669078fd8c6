"""Specialise a graph of symbolic sizes to given sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.analysis.type_inference.size_expressions import compiled, python_text
from fxkit.analysis.type_inference.type_facts import symbols_in
from fxkit.errors import UnsupportedError
from fxkit.ir.symbols import NAMES, SYM_TYPES, Symbol
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.torch_adapters import pytree

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


class Specialiser:
    """Makes copies of a graph with symbolic sizes, with the sizes of some inputs put in.

    The types in a copy are those of the graph with numbers put into their expressions, which takes
    a fraction of the time that it takes to propagate them. For the first copy both is done; where
    they differ, as where a type is not known as an expression, all copies are made the slow way.

    Args:
        gm: The graph; it is left as it is.
        assumed: Relations of its symbolic sizes that it takes to hold.
    """

    def __init__(self, gm: fx.GraphModule, assumed: Sequence[Symbol] = ()) -> None:
        self._gm = gm
        self._expressions: _Expressions | None = _Expressions(gm, assumed)
        self._is_checked = False

    def at(self, args: tuple[Any, ...]) -> fx.GraphModule:
        """Return the copy for the sizes of some inputs."""
        found = self.quickly_at(args)
        return _with_types(self._gm, self._propagated(args)) if found is None else found

    def quickly_at(self, args: tuple[Any, ...]) -> fx.GraphModule | None:
        """Return the copy for the sizes of some inputs if its types follow from expressions.

        None also where something does not hold that the graph takes to.
        """
        expressions = self._expressions
        types = None if expressions is None else expressions.types(args)
        if expressions is None or types is None:
            return None
        if not self._is_checked:
            self._is_checked = True
            propagated = self._propagated(args)
            expressions.take_from(propagated)
            if expressions.types(args) != propagated:
                self._expressions = None
                return None
            types = propagated
        return _with_types(self._gm, types)

    def _propagated(self, args: tuple[Any, ...]) -> list[Any]:
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node in self._gm.graph.nodes:
            values[node] = graph.node_copy(node, values.__getitem__)
        propagate_types(fx.GraphModule(self._gm, graph), args)
        return [type_of(node) for node in graph.nodes]


def assumptions(gm: fx.GraphModule) -> list[Symbol]:
    """Return what was taken to hold of the symbolic sizes of a graph, so far.

    Where torch has to know more than an expression, it decides by the sizes of the example. What it
    does then, as in a pass that looks at what an operator calls, is right only for those sizes for
    which the answer is the same.
    """
    inputs = [type_of(node) for node in gm.graph.nodes if node.op == "placeholder"]
    free = _places(inputs)
    nodes = [s.node for known in inputs for s in symbols_in(known) if s.node is not None]
    found: dict[Symbol, None] = {}
    for env in {id(node.shape_env): node.shape_env for node in nodes}.values():
        names = getattr(env, NAMES, {})
        fixed = {s: to for s, to in env.replacements.items() if str(names.get(s, s)) not in free}
        for guard in env.guards:
            relation = guard.expr.xreplace(fixed).xreplace(names)
            if relation != True:  # noqa: E712 (of sympy, whose truth is an object)
                found[Symbol(relation, kind=bool)] = None
    return list(found)


def holds_expressions(gm: fx.GraphModule) -> bool:
    """Tell whether calls are given sizes that are expressions and that no node computes."""
    operands = (leaf for n in gm.graph.nodes for leaf in pytree.tree_leaves((n.args, n.kwargs)))
    return any(isinstance(leaf, (Symbol, *SYM_TYPES)) for leaf in operands)


class _Expressions:
    """The types of a graph as functions of its symbolic sizes."""

    def __init__(self, gm: fx.GraphModule, assumed: Sequence[Symbol]) -> None:
        self._nodes = list(gm.graph.nodes)
        self._known = [type_of(node) for node in self._nodes]
        self._returned = frozenset(self._nodes[-1].all_input_nodes)
        inputs = [type_of(node) for node in gm.graph.nodes if node.op == "placeholder"]
        self._inputs = inputs
        self._places = _places(inputs)
        self._functions: dict[Symbol, Callable[..., Any] | None] = {}
        self._assumed = assumed

    def types(self, args: tuple[Any, ...]) -> list[Any] | None:
        """Return the type of each node for the sizes of some inputs, or None if it isn't known."""
        sizes = [args[index].shape[axis] for index, axis in self._places.values()]
        try:
            inputs = [self._at(known, sizes) for known in self._inputs]
            if inputs != [TensorType.of(arg) for arg in args]:
                return None
            if not all(self._number(relation, sizes) for relation in self._assumed):
                return None
            return [self._at(known, sizes) for known in self._known]
        except (_Unknown, ZeroDivisionError):
            return None

    def take_from(self, types: list[Any]) -> None:
        """Take from types what no size decides: what autograd follows, which passes may not know,
        and strides along axes of one element, which torch finds in several ways.
        """
        self._known = [
            known if node in self._returned else _like(known, of)
            for node, known, of in zip(
                self._nodes, map(_followed, self._known, types), types, strict=True
            )
        ]

    def _at(self, known: Any, sizes: list[int]) -> Any:
        if isinstance(known, TensorType):
            return self._tensor_at(known, sizes) if known.is_symbolic else known
        if isinstance(known, Symbol):
            return self._number(known, sizes)
        if isinstance(known, (tuple, list)):
            items = [self._at(item, sizes) for item in known]
            if hasattr(known, "_fields"):
                return type(known)(*items)
            return type(known)(items)
        if isinstance(known, dict):
            return {key: self._at(value, sizes) for key, value in known.items()}
        return known

    def _tensor_at(self, known: TensorType, sizes: list[int]) -> TensorType:
        shape = tuple(self._number(s, sizes) if isinstance(s, Symbol) else s for s in known.shape)
        if any(now < 2 and type(s) is Symbol for now, s in zip(shape, known.shape, strict=True)):
            raise _Unknown
        stride = known.stride and tuple(
            self._number(s, sizes) if isinstance(s, Symbol) else s for s in known.stride
        )
        return TensorType(shape, known.dtype, stride, known.device, known.requires_grad)

    def _number(self, symbol: Symbol, sizes: list[int]) -> Any:
        if symbol not in self._functions:
            self._functions[symbol] = _function(symbol, list(self._places))
        function = self._functions[symbol]
        if function is None:
            raise _Unknown
        return symbol.kind(function(*sizes))


def _followed(known: Any, of: Any) -> Any:
    """Return a type that autograd follows as it does another one."""
    if isinstance(known, TensorType) and isinstance(of, TensorType):
        return replace(known, requires_grad=of.requires_grad)
    return known


def _like(known: Any, of: Any) -> Any:
    """Return the second type where it is the first but for strides that lead to no element."""
    if not (isinstance(known, TensorType) and isinstance(of, TensorType)) or known.is_symbolic:
        return known
    if known.stride is None or of.stride is None or replace(known, stride=of.stride) != of:
        return known
    apart = zip(known.shape, known.stride, of.stride, strict=True)
    return of if all(size == 1 or one == other for size, one, other in apart) else known


class _Unknown(Exception):
    """A type can't be told from the sizes of inputs."""


def _places(inputs: list[Any]) -> dict[str, tuple[int, int]]:
    """Return where each symbolic size can be read: in which input, along which axis."""
    places: dict[str, tuple[int, int]] = {}
    for index, known in enumerate(inputs):
        for axis, size in enumerate(known.shape if isinstance(known, TensorType) else ()):
            if isinstance(size, Symbol) and size.expression.is_symbol:
                places.setdefault(str(size), (index, axis))
    return places


def _function(symbol: Symbol, names: list[str]) -> Callable[..., Any] | None:
    if not {str(part) for part in symbol.expression.free_symbols} <= set(names):
        return None
    try:
        return compiled(python_text(symbol.expression), names)
    except UnsupportedError:
        return None


def _with_types(gm: fx.GraphModule, types: list[Any]) -> fx.GraphModule:
    """Return a copy of a graph with certain types, and numbers in place of what computes them."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    for node, known in zip(gm.graph.nodes, types, strict=True):
        if _is_number(node, known, values):
            values[node] = known
            continue
        copied = graph.node_copy(node, values.__getitem__)
        set_type(copied, known)
        values[node] = copied
    return fx.GraphModule(gm, graph)


def _is_number(node: fx.Node, known: Any, values: dict[fx.Node, Any]) -> bool:
    if node.op != "call_function" or type(known) not in (int, float, bool):
        return False
    if node.target in _SIZES:
        return True
    is_from_numbers = not any(isinstance(values[o], fx.Node) for o in node.all_input_nodes)
    return node.target in _ARITHMETIC and is_from_numbers
