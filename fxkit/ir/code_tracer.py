"""Graphs out of the code that torch.fx generates of them, node by node.

A pickled `GraphModule` holds its code, and torch follows that with placeholders when it is loaded.
What needs no input is computed then, once: a dropout's mask becomes a constant. What takes no
placeholder, such as a guard, fails. Read as it is written, the code gives the graph it was made of.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.ir.names import keep_module_name
from fxkit.torch_adapters.fx_graphs import set_tracer
from fxkit.torch_adapters.fx_nodes import rename_node

_BINARY: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    ast.Add: (operator.add, operator.iadd),
    ast.Sub: (operator.sub, operator.isub),
    ast.Mult: (operator.mul, operator.imul),
    ast.FloorDiv: (operator.floordiv, operator.ifloordiv),
    ast.Div: (operator.truediv, operator.itruediv),
    ast.Mod: (operator.mod, operator.imod),
    ast.Pow: (operator.pow, operator.ipow),
    ast.LShift: (operator.lshift, operator.ilshift),
    ast.RShift: (operator.rshift, operator.irshift),
    ast.BitAnd: (operator.and_, operator.iand),
    ast.BitOr: (operator.or_, operator.ior),
    ast.BitXor: (operator.xor, operator.ixor),
    ast.MatMult: (operator.matmul, operator.imatmul),
}
_COMPARED: dict[type, Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
}
_UNARY: dict[type, Callable[..., Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}


class CodeTracer(fx.Tracer):
    """Reads a graph module's code; torch loads pickled ones by the tracer that they name."""

    proxy_buffer_attributes = True

    def trace(
        self, root: torch.nn.Module | Callable[..., Any], concrete_args: Any = None
    ) -> fx.Graph:
        """Return the graph of a module, by its code where that is torch.fx's own."""
        try:
            return _Reader(root).graph
        except (_Unread, KeyError, NameError):
            return super().trace(root, concrete_args)


def read_by_code(gm: fx.GraphModule) -> None:
    """Let a module, and those made of its graph, be read by their code when they are loaded."""
    set_tracer(gm, CodeTracer)


class _Unread(Exception):
    """The code is of a kind that torch.fx does not generate for plain graphs."""


class _Reader:
    def __init__(self, root: Any) -> None:
        source = getattr(root, "_code", None)
        if not isinstance(source, str):
            raise _Unread
        self.graph = keep_module_name(fx.Graph(tracer_cls=CodeTracer))
        self._globals = type(root).forward.__globals__
        self._values: dict[str, Any] = {}
        self._written: fx.Node | None = None
        definitions = [it for it in ast.parse(source).body if isinstance(it, ast.FunctionDef)]
        if not definitions:
            raise _Unread
        self._read(definitions[-1])

    def _read(self, function: ast.FunctionDef) -> None:
        given = function.args
        if given.kwonlyargs or given.posonlyargs or not given.args:
            raise _Unread
        inputs = given.args[1:]
        defaults = [()] * (len(inputs) - len(given.defaults)) + [(d,) for d in given.defaults]
        for parameter, default in zip(inputs, defaults, strict=True):
            self._input(parameter.arg, parameter, tuple(map(self._value, default)))
        if given.vararg is not None:
            self._input(f"*{given.vararg.arg}", given.vararg, ())
        if given.kwarg is not None:
            self._input(f"**{given.kwarg.arg}", given.kwarg, ())
        for statement in function.body:
            self._statement(statement)

    def _input(self, target: str, parameter: ast.arg, default: tuple[Any, ...]) -> None:
        node = self.graph.placeholder(target)
        node.args = default
        node.type = None if parameter.annotation is None else self._constant(parameter.annotation)
        self._values[parameter.arg] = node

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Return) and statement.value is not None:
            self.graph.output(self._value(statement.value))
        elif isinstance(statement, ast.AugAssign):
            function = _BINARY[type(statement.op)][1]
            args = (self._value(statement.target), self._value(statement.value))
            self._written = self._call(function, args)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            node = self._assigned(statement.target, statement.value)
            node.type = self._constant(statement.annotation)
        elif isinstance(statement, ast.Assign):
            self._assign(statement)
        else:
            raise _Unread

    def _assign(self, statement: ast.Assign) -> None:
        target, value = statement.targets[0], statement.value
        if isinstance(value, ast.Constant) and value.value is None:
            return  # it frees values
        if isinstance(target, ast.Subscript):
            args = (self._value(target.value), self._value(target.slice), self._value(value))
            self._written = self._call(operator.setitem, args)
            return
        self._assigned(target, value)

    def _assigned(self, target: ast.expr, value: ast.expr) -> fx.Node:
        """Give the node that an expression makes the name that it is assigned to."""
        if not isinstance(target, ast.Name):
            raise _Unread
        if isinstance(value, ast.Name):  # an input by another name, or what was just written to
            node, self._written = self._written or self._values.get(value.id), None
        else:
            node = self._node(value)
        if not isinstance(node, fx.Node):
            raise _Unread
        rename_node(node, target.id)
        self._values[target.id] = node
        return node

    # Each statement makes one node; what is nested in it are values.

    def _node(self, made: ast.expr) -> fx.Node:
        if isinstance(made, ast.Call):
            return self._called(made)
        if isinstance(made, ast.Attribute):
            path = self._path(made)
            if path is not None:
                return self.graph.create_node("get_attr", path)
            return self._call(getattr, (self._value(made.value), made.attr))
        if isinstance(made, ast.BinOp):
            args = (self._value(made.left), self._value(made.right))
            return self._call(_BINARY[type(made.op)][0], args)
        if isinstance(made, ast.UnaryOp) and type(made.op) in _UNARY:
            return self._call(_UNARY[type(made.op)], (self._value(made.operand),))
        if isinstance(made, ast.Compare) and type(made.ops[0]) in _COMPARED:
            args = (self._value(made.left), self._value(made.comparators[0]))
            return self._call(_COMPARED[type(made.ops[0])], args)
        if isinstance(made, ast.Subscript):
            args = (self._value(made.value), self._value(made.slice))
            return self._call(operator.getitem, args)
        raise _Unread

    def _called(self, made: ast.Call) -> fx.Node:
        function, path = made.func, self._path(made.func)
        args = tuple(map(self._value, made.args))
        kwargs = {str(it.arg): self._value(it.value) for it in made.keywords}
        if path is not None:
            return self.graph.create_node("call_module", path, args, kwargs)
        whole = self._path(made)
        if whole is not None:  # getattr(self, "0")
            return self.graph.create_node("get_attr", whole)
        base = self._held(function.value) if isinstance(function, ast.Attribute) else None
        if isinstance(function, ast.Attribute) and base is not None:
            return self.graph.create_node("call_method", function.attr, (base, *args), kwargs)
        return self._call(self._constant(function), args, kwargs)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        return self.graph.create_node("call_function", function, args, kwargs or {})

    def _held(self, value: ast.expr) -> fx.Node | None:
        return self._values.get(value.id) if isinstance(value, ast.Name) else None

    def _path(self, made: ast.expr) -> str | None:
        """Return the path of an attribute of the module, without its first dot; else None."""
        atoms: list[str] = []
        while not isinstance(made, ast.Name):
            if isinstance(made, ast.Attribute):
                atoms.append(made.attr)
                made = made.value
            elif isinstance(made, ast.Call) and _is_getattr(made):
                atoms.append(ast.literal_eval(made.args[1]))
                made = made.args[0]
            else:
                return None
        return ".".join(reversed(atoms)) if made.id == "self" and atoms else None

    def _value(self, value: ast.expr) -> Any:
        """Return a value that holds nodes."""
        if isinstance(value, ast.Name) and value.id in self._values:
            return self._values[value.id]
        if isinstance(value, (ast.Tuple, ast.List)):
            items = [self._value(item) for item in value.elts]
            return tuple(items) if isinstance(value, ast.Tuple) else items
        if isinstance(value, ast.Dict):
            keys = [self._constant(key) for key in value.keys if key is not None]
            return dict(zip(keys, map(self._value, value.values), strict=True))
        if isinstance(value, ast.Call):
            made = self._constant(value.func)
            kwargs = {str(it.arg): self._value(it.value) for it in value.keywords}
            return made(*map(self._value, value.args), **kwargs)
        return self._constant(value)

    def _constant(self, value: ast.expr) -> Any:
        code = compile(ast.Expression(value), "<fxkit>", "eval")
        return eval(code, self._globals)


def _is_getattr(made: ast.Call) -> bool:
    """Tell whether a call asks for an attribute whose name is no name in Python."""
    is_plain = isinstance(made.func, ast.Name) and made.func.id == "getattr"
    return is_plain and len(made.args) == 2 and isinstance(made.args[1], ast.Constant)
