"""Nodes that compute sizes which are expressions, in place of torch's symbolic numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.analysis.type_inference.size_expressions import compiled, python_text
from fxkit.errors import UnsupportedError
from fxkit.ir.session import EditSession
from fxkit.ir.symbols import SYM_TYPES, Symbol, read_number
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters import pytree


class SizeNodes:
    """Makes the nodes that compute expressions, each of them once.

    torch's symbolic numbers mean something to the run that they come from only: a graph that held
    one would have the size of its example in it.

    Args:
        edit: The session.
        operands: Nodes whose types are looked through for sizes first; the graph's inputs are next.
        before: Where to insert.
    """

    def __init__(self, edit: EditSession, operands: Sequence[fx.Node], before: fx.Node) -> None:
        self._edit = edit
        self._sources = [*operands, *edit.graph.find_nodes(op="placeholder")]
        self._before = before
        self._made: dict[Symbol, fx.Node] = {}
        self._roots: dict[str, fx.Node] = {}

    def check(self, value: Any) -> None:
        """See whether nodes can compute all expressions in a nested value.

        Raises:
            Unrecordable: When they can't.
        """
        for leaf in pytree.tree_leaves(value):
            known = read_number(leaf)
            if isinstance(known, Symbol) and self._given(known) is None:
                for name in _function(known)[1]:
                    self._place(name)

    def in_place(self, value: Any) -> Any:
        """Return a nested value with nodes in place of expressions."""
        return pytree.tree_map_only(SYM_TYPES, self._node_of, value)

    def _node_of(self, number: Any) -> Any:
        known = read_number(number)
        if not isinstance(known, Symbol):
            return known
        if known not in self._made:
            self._made[known] = self._given(known) or self._computed(known)
        return self._made[known]

    def _given(self, wanted: Symbol) -> fx.Node | None:
        return next((node for node in self._sources if type_of(node) == wanted), None)

    def _computed(self, wanted: Symbol) -> fx.Node:
        function, names = _function(wanted)
        try:
            return function(*(_Size(self, self._root(name)) for name in names)).node
        except TypeError as error:
            raise Unrecordable(f"nodes can't compute {wanted}") from error

    def _root(self, name: str) -> fx.Node:
        if name not in self._roots:
            tensor, axis = self._place(name)
            self._roots[name] = self.call(torch.ops.aten.sym_size.int, tensor, axis)
        return self._roots[name]

    def _place(self, name: str) -> tuple[fx.Node, int]:
        for node in self._sources:
            known = type_of(node)
            for axis, size in enumerate(known.shape if isinstance(known, TensorType) else ()):
                if isinstance(size, Symbol) and str(size) == name:
                    return node, axis
        raise Unrecordable(f"no operand has the size {name}")

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Insert a call with its type recorded."""
        made = self._edit.call(target, *args, before=self._before)
        infer_type(made)
        return made


def _function(wanted: Symbol) -> tuple[Callable[..., Any], list[str]]:
    """Return an expression as a function, and the names of the sizes that it takes."""
    import sympy

    free = sorted(wanted.expression.free_symbols, key=str)
    plain = [sympy.Symbol(f"s{n}", integer=True, positive=True) for n in range(len(free))]
    renamed = wanted.expression.xreplace(dict(zip(free, plain, strict=True)))
    try:
        text = python_text(renamed)
    except UnsupportedError as error:
        raise Unrecordable(error.message) from error
    return compiled(text, list(map(str, plain))), list(map(str, free))


class _Size:
    """A number whose arithmetic inserts nodes."""

    def __init__(self, makes: SizeNodes, node: fx.Node) -> None:
        self.node = node
        self._makes = makes

    def _with(self, function: Callable[..., Any], *operands: Any) -> _Size:
        nodes = [each.node if isinstance(each, _Size) else each for each in operands]
        return _Size(self._makes, self._makes.call(function, *nodes))


def _binary(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return an operator's method and its reflected one."""
    return (
        lambda self, other: self._with(function, self, other),
        lambda self, other: self._with(function, other, self),
    )


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    for _prefix, _method in zip(("", "r"), _binary(getattr(operator, _name)), strict=True):
        setattr(_Size, f"__{_prefix}{_name}__", _method)
