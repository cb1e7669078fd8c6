"""The source of a function as a syntax tree, and refusals that point into it."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxkit.errors import UnsupportedError


@dataclass(frozen=True)
class FunctionSource:
    """A function's source.

    Attributes:
        name: The function's name.
        tree: Its definition, or the lambda.
        file: Where it stands.
        first_line: The line there on which the text of `tree` begins.
        outside: Name → value of the closure and of the module's globals.
    """

    name: str
    tree: ast.FunctionDef | ast.Lambda
    file: str
    first_line: int
    outside: Mapping[str, Any]

    def place(self, node: ast.AST) -> str:
        """Return where a part of it stands, as messages have it."""
        line = self.first_line + getattr(node, "lineno", 1) - 1
        return f"{self.file}:{line} in {self.name}"

    def refusal(self, node: ast.AST, message: str, hint: str) -> UnsupportedError:
        """Return the error for a part that can't be read, with its line and the remedy."""
        return UnsupportedError(message, source=self.place(node), hint=hint)


class SourceMissingError(UnsupportedError):
    """A function's source is not to be had."""


def source_of_function(function: Callable[..., Any]) -> FunctionSource:
    """Return the source of a Python function.

    Raises:
        UnsupportedError: When it is no Python function.
        SourceMissingError: When its source is not to be had.
    """
    name = getattr(function, "__name__", repr(function))
    if not inspect.isfunction(function):
        raise UnsupportedError(
            f"expected a Python function of scalars, got {type(function).__name__} {name}",
            hint="write it with def; methods and callable objects can't be read",
        )
    try:
        lines, first_line = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise SourceMissingError(
            f"expected a function whose source can be read, got {name} without",
            source=f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}",
            hint="put it into a file or a notebook cell; exec and python -c keep no source",
        ) from error
    file = Path(function.__code__.co_filename).name
    return FunctionSource(
        name, _tree(lines, function), file, max(first_line, 1), _outside(function)
    )


def _tree(lines: list[str], function: Callable[..., Any]) -> ast.FunctionDef | ast.Lambda:
    text = textwrap.dedent("".join(lines))
    is_lambda = function.__code__.co_name == "<lambda>"
    for candidate in (text, f"({text.strip()})"):
        try:
            tree = ast.parse(candidate)
        except SyntaxError:
            continue
        kind = ast.Lambda if is_lambda else ast.FunctionDef
        found = [node for node in ast.walk(tree) if isinstance(node, kind)]
        if found and (len(found) == 1 or not is_lambda):
            return found[0]
    if is_lambda and (node := _lambda_in_file(function.__code__)) is not None:
        return node
    raise UnsupportedError(
        f"expected one function in the lines of {function.__name__}, got another number of them",
        hint="define it by itself, with def",
    )


def _lambda_in_file(code: types.CodeType) -> ast.Lambda | None:
    """Return a lambda among others, or in an expression of several lines; None if not found."""
    places = [place for place in code.co_positions() if None not in place and place[3]]
    tree = _tree_of_file("".join(linecache.getlines(code.co_filename)))
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)] if tree else []
    found = [node for node in lambdas if all(_spans(node.body, place) for place in places)]
    # The innermost one: those around it hold what it computes as well.
    return _moved_up(found[-1]) if found and places else None


def _spans(node: ast.expr, place: tuple[int | None, ...]) -> bool:
    line, end_line, column, end_column = place
    first, last = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return first <= (line, column) and (end_line, end_column) <= last  # type: ignore[operator]


def _moved_up(node: ast.Lambda) -> ast.Lambda:
    """Return a lambda whose lines count from its own."""
    moved = copy.deepcopy(node)
    return ast.increment_lineno(moved, 1 - node.lineno)


@functools.lru_cache(maxsize=4)
def _tree_of_file(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def _outside(function: Any) -> dict[str, Any]:
    found = dict(function.__globals__)
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            found.pop(name, None)
    return found
