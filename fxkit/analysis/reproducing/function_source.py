"""Python functions by their source, with whatever they need from around them.

A function that is written so must get by with what a new process can have: modules, importable
functions and classes, plain values, tensors, and other functions for which the same holds.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, Protocol

from fxkit.errors import FxkitError, UnsupportedError


class ValueWriter(Protocol):
    """Writes values as expressions; see `fxkit.analysis.reproducing.python_code.PythonWriter`."""

    def named(self, value: Any, name: str) -> str:
        """Return an expression for a value; its tensors get this name."""
        ...


class FunctionWriter:
    """Collects functions and the values that they use, as lines of one script.

    Args:
        values: Writes what the functions take from around them.

    Attributes:
        lines: The definitions, those that others use first.
    """

    def __init__(self, values: ValueWriter) -> None:
        self.values = values
        self.lines: list[str] = []
        self._names: dict[FunctionType, str] = {}
        self._meaning: dict[str, Any] = {}

    def add(self, function: Callable[..., Any], name: str | None = None) -> str:
        """Define a function in the script; return its name.

        Args:
            function: A function that was defined by `def` or `lambda` in a file.
            name: Name to give it; its own when left out, `function` for a lambda.

        Raises:
            UnsupportedError: When its source can't be had, or it uses what can't be written.
        """
        if not isinstance(function, FunctionType):
            raise _refusal(function, "it is no plain function")
        if function in self._names:
            return self._names[function]
        tree = _tree_of(function)
        own = function.__name__ if function.__name__ != "<lambda>" else "function"
        name = self._claim(name or own, function)
        self._names[function] = name
        for used, value in _surroundings(function, tree):
            self._bind(used, value, function)
        if isinstance(tree, ast.Lambda):
            self.lines.append(f"{name} = {ast.unparse(tree)}")
        else:
            tree.name = name
            self.lines.append(ast.unparse(tree))
        return name

    def _claim(self, wished: str, meaning: Any) -> str:
        name, count = wished, 0
        while self._meaning.setdefault(name, meaning) is not meaning:
            count += 1
            name = f"{wished}_{count}"
        return name

    def _bind(self, name: str, value: Any, user: FunctionType) -> None:
        """Give a name that a function uses its meaning in the script."""
        if name in self._meaning:
            if self._meaning[name] is not value:
                raise _refusal(user, f"{name!r} means two things in what it uses")
            return
        if isinstance(value, FunctionType) and not _is_library(value):
            self.add(value, name)
            return
        self._meaning[name] = value
        try:
            text = self.values.named(value, name)
        except FxkitError as error:
            raise _refusal(user, f"{name!r}: {error.message}") from error
        if text != name:
            self.lines.append(f"{name} = {text}")


def _is_library(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "fxkit")


def _surroundings(function: FunctionType, tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the names that a function takes from around it, with their values."""
    closed = inspect.getclosurevars(function).nonlocals
    missing = set(function.__code__.co_freevars) - set(closed)
    if missing:
        raise _refusal(function, f"{min(missing)!r} is not set")
    yield from closed.items()
    defaults = [*tree.args.defaults, *(d for d in tree.args.kw_defaults if d is not None)]  # type: ignore[attr-defined]
    in_defaults = {n.id for d in defaults for n in ast.walk(d) if isinstance(n, ast.Name)}
    for name in (*_globals_of(function.__code__), *sorted(in_defaults)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
        elif not hasattr(builtins, name):
            raise _refusal(function, f"{name!r} is not known at the top level of its module")


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function reads, and the functions inside of it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _tree_of(function: FunctionType) -> ast.FunctionDef | ast.Lambda:
    """Return the definition of a function, found by its first line."""
    try:
        lines, _ = inspect.findsource(function)
    except (OSError, TypeError) as error:
        raise _refusal(function, "its source is in no file") from error
    for tree, line, column in _parsed(lines, function.__code__.co_firstlineno):
        if function.__name__ == "<lambda>":
            found = _lambdas_at(function, tree, line, column)
        else:
            found = _definitions_at(function, tree, line)
        if len(found) == 1:
            return found[0]
        if found:
            raise _refusal(function, "its file has several functions in that line")
    # Python 3.13 keeps the text of `python -c` under the name that `exec` gives to any other.
    if function.__code__.co_filename == "<string>":
        raise _refusal(function, "its source is in no file")
    raise _refusal(function, "it is decorated, or its file has changed")


def _parsed(lines: list[str], first: int) -> Iterator[tuple[ast.AST, int, int]]:
    """Yield the statement at a line, then the whole file, as far as they are Python.

    With each come the number of the line in it, and how far its columns are shifted.
    """
    block = inspect.getblock(lines[first - 1 :])
    indent = len(block[0]) - len(block[0].lstrip()) if block else 0
    for text, line, column in (("".join(block), 1, indent), ("".join(lines), first, 0)):
        try:
            yield ast.parse(textwrap.dedent(text)), line, column
        except SyntaxError:  # a part of a statement, or a page with code in it
            continue


def _definitions_at(function: FunctionType, tree: ast.AST, line: int) -> list[Any]:
    found = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__
        and node.lineno == line and not node.decorator_list
    ]  # fmt: skip
    for node in found:
        node.returns = None
    return found


def _lambdas_at(function: FunctionType, tree: ast.AST, line: int, column: int) -> list[Any]:
    """Return the lambdas of a line whose body holds the instructions of a function."""
    shift = line - function.__code__.co_firstlineno
    places = {
        (p[0] + shift, p[2] - column)
        for p in function.__code__.co_positions()
        if p[0] and p[2] is not None
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Lambda) or node.lineno != line:
            continue
        body = [n for n in ast.walk(node.body) if isinstance(n, ast.expr)]
        inside = {(n.lineno, n.col_offset) for n in body}
        if places <= inside | {(line, node.col_offset), (line, -column)}:
            found.append(node)
    return found


def _refusal(function: Any, reason: str) -> UnsupportedError:
    shown = getattr(function, "__qualname__", type(function).__name__)
    return UnsupportedError(
        f"expected a function that a new process can have, got {shown}: {reason}",
        hint="define it by def at the top level of a module, over modules and plain values",
    )
