"""A graph as a Python function that releases each value after its last use.

The code that torch.fx generates is meant to be read, and takes milliseconds to generate. Here the
text holds calls and names alone; functions and constants are passed beside it. So equal graphs have
the same text, which is compiled once.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import fx

Boxed = Callable[[Any, list[Any]], Any]


def boxed_function(graph: fx.Graph) -> Boxed:
    """Return a graph as a function of its owner and of a list of its inputs, which it empties.

    Args:
        graph: Its inputs have no defaults and are no `*args`.
    """
    return _Writer(graph).function()


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<fxkit>", "exec")


class _Writer:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._names: dict[fx.Node, str] = {}
        self._beside: dict[str, Any] = {}
        self._dead_after = _dead_after(graph)

    def function(self) -> Boxed:
        """Return the function."""
        nodes = list(self._graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        taken = ", ".join(map(self._named, inputs))
        lines = ["def run(self, box):", f" [{taken}] = box; box.clear()"]
        lines += [self._line(node) for node in nodes[len(inputs) :]]
        namespace = self._beside
        exec(_compiled("\n".join(lines)), namespace)
        return namespace["run"]

    def _line(self, node: fx.Node) -> str:
        if node.op == "output":
            return f" return {self._written(node.args[0])}"
        value = self._value(node)
        dead = "".join(f"{self._names[each]} = " for each in self._dead_after.get(node, ()))
        if not node.users:
            return f" {value}" + (f"; {dead}None" if dead else "")
        return f" {self._named(node)} = {value}" + (f"; {dead}None" if dead else "")

    def _value(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return _path(str(node.target))
        if node.op == "call_method":
            owner, *rest = node.args
            return f"{self._written(owner)}.{node.target}({self._operands(tuple(rest), node)})"
        is_module = node.op == "call_module"
        called = _path(str(node.target)) if is_module else self._put_beside(node.target)
        return f"{called}({self._operands(node.args, node)})"

    def _operands(self, args: tuple[Any, ...], node: fx.Node) -> str:
        named = (self._option(name, value) for name, value in node.kwargs.items())
        return ", ".join((*map(self._written, args), *named))

    def _option(self, name: str, value: Any) -> str:
        if keyword.iskeyword(name):  # `from`, which random operators have
            return f"**{{{name!r}: {self._written(value)}}}"
        return f"{name}={self._written(value)}"

    def _written(self, value: Any) -> str:
        """Return an operand as an expression; a list or a dict is made anew at each call."""
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, list):
            return f"[{', '.join(map(self._written, value))}]"
        if isinstance(value, dict):
            pairs = (f"{self._put_beside(k)}: {self._written(v)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._written, (value.start, value.stop, value.step)))})"
        if isinstance(value, tuple):
            items = "".join(f"{self._written(item)}, " for item in value)
            if hasattr(value, "_fields"):
                return f"{self._put_beside(type(value))}({items})"
            return f"({items})"
        return self._put_beside(value)

    def _named(self, node: fx.Node) -> str:
        return self._names.setdefault(node, f"v{len(self._names)}")

    def _put_beside(self, value: Any) -> str:
        name = f"c{len(self._beside)}"
        self._beside[name] = value
        return name


def _dead_after(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node, the values that none after it needs."""
    dead: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for operand in node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                dead.setdefault(node, []).append(operand)
    return dead


def _path(target: str) -> str:
    """Return an attribute of the owner as an expression; a number is an attribute of a list."""
    value = "self"
    for name in target.split("."):
        value = f"{value}.{name}" if name.isidentifier() else f"getattr({value}, {name!r})"
    return value
