"""Reading calls: of functions of `math` and Python, of rows, other operators and lambdas."""

from __future__ import annotations

import ast
import inspect
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fxkit.authoring.operators.callables import FUNCTIONS
from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.primitives import substituted, term, truth
from fxkit.authoring.operators.row_calls import METHODS, call_of_rows, is_of_rows, mapped
from fxkit.authoring.operators.row_values import RowMethod, RowValue
from fxkit.authoring.operators.source import FunctionSource
from fxkit.authoring.operators.terms import Term, const, number
from fxkit.authoring.operators.values import LocalFunction, as_term, is_number, plain

# What may be called on numbers and tuples that are known when the function is read.
_KNOWN_CALLS = (range, len, enumerate, zip, reversed, tuple, list)

_OF_ROWS = "write sum(f(x) for x in row), max(...) or [f(x) for x in row]"


@dataclass(frozen=True)
class CallReader:
    """Reads the calls of one function.

    Attributes:
        source: The function.
        call_function: Reads a call of a Python function: of it, its arguments and the node.
    """

    source: FunctionSource
    call_function: Callable[..., Any]

    def result(
        self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: ast.AST
    ) -> Any:
        """Return what a call returns.

        Args:
            callee: What is called.
            args: The values of its arguments.
            kwargs: Those that are given by name.
            node: The call, for refusals.
        """
        if isinstance(callee, LocalFunction):
            return self._local(callee, args, kwargs, node)
        if isinstance(callee, RowMethod):
            return self._method(callee, args, kwargs, node)
        definition = getattr(callee, "definition", None)
        if isinstance(definition, Definition):
            return self._operator(definition, args, kwargs, node)
        has_rows = any(isinstance(arg, RowValue) for arg in args)
        if callee is map and args:
            return self._mapped(args, node)
        if has_rows and (is_of_rows(callee) or not inspect.isfunction(callee)):
            return self._of_rows(callee, args, kwargs, node)
        if callee in (sum, all, any) and len(args) == 1 and isinstance(args[0], tuple):
            return self._folded(callee, args[0], node)
        if isinstance(callee, types.BuiltinFunctionType | type) and callee in FUNCTIONS:
            return self._builtin(callee, args, kwargs, node)
        if callee in _KNOWN_CALLS:
            return self._known(callee, args, kwargs, node)
        if inspect.isfunction(callee):
            return self.call_function(callee, args, kwargs, self.source, node)
        return self._of_numbers(callee, args, node)

    def _local(
        self, callee: LocalFunction, args: tuple[Any, ...], kwargs: dict[str, Any], node: ast.AST
    ) -> Any:
        if kwargs or len(args) != callee.arity:
            raise self.source.refusal(
                node,
                f"expected {callee.arity} arguments of a lambda, got {len(args) + len(kwargs)}",
                "let it take as many, without names",
            )
        return plain(callee.read(args))

    # Rows.

    def _of_rows(
        self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: ast.AST
    ) -> Any:
        found = call_of_rows(callee, args, kwargs)
        if found is not None:
            return found
        name = getattr(callee, "__name__", type(callee).__name__)
        raise self.source.refusal(
            node,
            f"expected sum, max, min, len, zip, accumulate or a comprehension of a row, got {name}",
            _OF_ROWS,
        )

    def _method(
        self, callee: RowMethod, args: tuple[Any, ...], kwargs: dict[str, Any], node: ast.AST
    ) -> Any:
        if kwargs or len(args) > 1:
            raise self.source.refusal(
                node,
                f"expected one function for row.{callee.name}, got {len(args) + len(kwargs)} "
                "arguments",
                f"write row.{callee.name}(lambda x: ...) or row.{callee.name}()",
            )
        values = self._mapped((args[0], callee.row), node) if args else callee.row
        return self._of_rows(METHODS[callee.name], (values,), {}, node)

    def _mapped(self, args: tuple[Any, ...], node: ast.AST) -> Any:
        """Return what `map` makes of a function, and of rows or of tuples."""
        function, *values = args
        if not (callable(function) or isinstance(function, LocalFunction)):
            kind = "a number" if isinstance(function, Term) else type(function).__name__
            raise self.source.refusal(
                node,
                f"expected a function of elements, got {kind}",
                "pass one: lambda x: x * x, math.exp, or a function that is defined outside",
            )

        def applied(items: tuple[Any, ...]) -> Any:
            return self.result(function, items, {}, node)

        found = mapped(applied, values)
        if found is None:
            raise self.source.refusal(
                node,
                "expected map of rows without conditions, or of tuples, got it of others",
                _OF_ROWS,
            )
        return found

    # Numbers.

    def _folded(self, function: Any, values: tuple[Any, ...], node: ast.AST) -> Any:
        terms = [as_term(value, self.source, node) for value in values]
        if function is sum:
            found: Any = const(0)
            for position, each in enumerate(terms):
                found = each if position == 0 else term("add", found, each)
            return found
        found = const(function is all)
        for each in terms:
            found = term("and" if function is all else "or", found, truth(each))
        return found

    def _builtin(
        self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: ast.AST
    ) -> Any:
        if callee in (max, min) and len(args) == 1 and isinstance(args[0], tuple):
            args = args[0]
        if kwargs:
            raise self.source.refusal(
                node,
                f"expected {callee.__name__} without keywords, got {', '.join(kwargs)}",
                "pass plain arguments",
            )
        try:
            return FUNCTIONS[callee](*[as_term(arg, self.source, node) for arg in args])
        except TypeError as error:
            raise self.source.refusal(
                node,
                f"expected a call of {callee.__name__} that kernels have, got one of "
                f"{len(args)} arguments",
                "see the table of functions in docs/operators_of_your_own.md",
            ) from error

    def _known(
        self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: ast.AST
    ) -> Any:
        if any(isinstance(arg, Term) for arg in (*args, *kwargs.values())):
            raise self.source.refusal(
                node,
                f"expected {callee.__name__} of numbers that are known when the operator is "
                "defined, got one of an operand",
                "loop over range(n) with a number n, and leave early by break",
            )
        found = callee(*args, **kwargs)
        return tuple(found) if isinstance(found, list) else found

    def _of_numbers(self, callee: Any, args: tuple[Any, ...], node: ast.AST) -> Any:
        """Call a function of `math` that kernels lack, of numbers that are known."""
        name = getattr(callee, "__name__", type(callee).__name__)
        is_math = getattr(math, name, None) is callee
        if is_math and all(map(is_number, args)):
            try:
                return callee(*args)
            except (ValueError, OverflowError, TypeError) as error:
                raise self.source.refusal(
                    node, f"expected a number, got {error}", "correct the argument"
                ) from error
        home = getattr(callee, "__module__", None) or ""
        hint = "call functions of math, abs, min, max, other operators or plain Python functions"
        if home.startswith("torch") and hasattr(math, name):
            hint = f"operands are scalars here: call math.{name}"
        raise self.source.refusal(node, f"expected a function that kernels have, got {name}", hint)

    def _operator(
        self, called: Definition, args: tuple[Any, ...], kwargs: dict[str, Any], node: ast.AST
    ) -> Any:
        """Put what another operator computes in the place of its call."""
        positional = [p for p in called.parameters if not p.is_keyword_only]
        given = dict(zip((p.name for p in positional), args, strict=False)) | kwargs
        wanted = {p.name for p in called.parameters}
        missing = [name for name in called.tensors if name not in given]
        if len(args) > len(positional) or missing or not set(given) <= wanted:
            raise self.source.refusal(
                node, f"expected the arguments of {called.schema}, got others", "correct the call"
            )
        rows = called.rows or frozenset()
        leaves: dict[Term, Term] = {}
        for parameter in called.parameters:
            name = parameter.name
            leaf = called.leaf(name) if parameter.is_tensor else number(name)
            value = given.get(name, parameter.default)
            if name in rows:
                value = self._row_item(value, called, name, node)
            leaves[leaf] = as_term(value, self.source, node)
        results = substituted(called.results, leaves)
        widths = called.wide or (False,) * len(results)
        found = tuple(RowValue(r) if w else r for r, w in zip(results, widths, strict=True))
        return found if called.is_tuple else found[0]

    def _row_item(self, value: Any, called: Definition, name: str, node: ast.AST) -> Any:
        is_whole = isinstance(value, RowValue) and value.condition is None
        if not is_whole or not isinstance(value.item, Term):
            raise self.source.refusal(
                node,
                f"expected a row for {name} of {called.name}, got another",
                "pass a row, or [f(x) for x in row] without a condition",
            )
        return value.item
