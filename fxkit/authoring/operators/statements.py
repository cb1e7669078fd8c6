"""Reading the statements of a function of scalars: all paths at once.

A path through a function ends by `return`, `break`, `continue` or at the end of a block. For each
of these ends a block has one set of names, in which values are chosen by the condition of the path
(if-conversion). Loops are unrolled; a `while` ends where its condition is known to be false.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from fxkit.authoring.operators.expressions import ExpressionReader
from fxkit.authoring.operators.primitives import term
from fxkit.authoring.operators.row_loops import depends, folded
from fxkit.authoring.operators.row_values import RowValue, extreme_of, total_of, where_held
from fxkit.authoring.operators.source import (
    FunctionSource,
    SourceMissingError,
    source_of_function,
)
from fxkit.authoring.operators.terms import Term, const, is_const, operand
from fxkit.authoring.operators.tracing import traced
from fxkit.authoring.operators.values import Names, Unset, as_term, joined, plain

# Loops of more steps are refused.
MAX_STEPS = 1000

NEXT, RETURN, BREAK, CONTINUE = "next", "return", "break", "continue"
_TRUE = const(True)

# End of a block → the condition of the paths that end so, and what names stand for there.
Ends = dict[str, tuple[Term, Names]]


class FunctionReader:
    """Reads a function and those that it calls.

    Args:
        callers: The functions whose calls led here, to notice recursion.
    """

    def __init__(self, callers: tuple[Callable[..., Any], ...] = ()) -> None:
        self._callers = callers

    def read(self, function: Callable[..., Any], arguments: Names) -> Any:
        """Return what a function returns: a term, a number or a tuple of these.

        Raises:
            UnsupportedError: When it can't be read; the message has line and remedy.
        """
        try:
            source = source_of_function(function)
        except SourceMissingError:
            if any(isinstance(value, RowValue) for value in arguments.values()):
                raise
            return traced(function, arguments)
        inner = FunctionReader((*self._callers, function))
        return _BlockReader(ExpressionReader(source, inner.call), source).result(arguments)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source: FunctionSource,
        node: ast.AST,
    ) -> Any:
        """Return what a call of a Python function returns."""
        if function in self._callers:
            raise source.refusal(
                node,
                f"expected calls that end, got a recursive call of {function.__name__}",
                "write it as a loop over a range",
            )
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise source.refusal(
                node, f"expected the arguments of {function.__name__}, got: {error}", "correct it"
            ) from error
        bound.apply_defaults()
        return self.read(function, bound.arguments)


class _BlockReader:
    def __init__(self, expressions: ExpressionReader, source: FunctionSource) -> None:
        self._expressions = expressions
        self._source = source

    def result(self, arguments: Names) -> Any:
        tree = self._source.tree
        if isinstance(tree, ast.Lambda):
            return self._expressions.value(tree.body, arguments)
        ends = self._block(tree.body, dict(arguments))
        if NEXT in ends or RETURN not in ends:
            last = tree.body[-1]
            raise self._source.refusal(
                last,
                f"expected {self._source.name} to return a value on every path, got a path that "
                "ends without",
                "end the function with a return",
            )
        return ends[RETURN][1][RETURN]

    def _block(self, statements: Sequence[ast.stmt], names: Names) -> Ends:
        ends: Ends = {}
        live = _TRUE
        for statement in statements:
            found = self._statement(statement, names)
            for kind in (RETURN, BREAK, CONTINUE):
                if kind in found:
                    condition, there = found[kind]
                    self._add(ends, kind, term("and", live, condition), there, statement)
            if NEXT not in found:
                return ends
            condition, names = found[NEXT]
            live = term("and", live, condition)
        ends[NEXT] = live, names
        return ends

    def _add(self, ends: Ends, kind: str, condition: Term, names: Names, at: ast.AST) -> None:
        """Add paths to those that end in a way already; none is in both."""
        if kind in ends:
            before, there = ends[kind]
            names = joined(before, there, names, self._source, at)
            condition = term("or", before, condition)
        ends[kind] = condition, names

    def _statement(self, node: ast.stmt, names: Names) -> Ends:
        read = getattr(self, f"_{type(node).__name__}", None)
        if read is None:
            what, hint = _REFUSED.get(type(node), (type(node).__name__.lower(), _STATEMENTS))
            raise self._source.refusal(
                node, f"expected arithmetic and control flow, got {what}", hint
            )
        return read(node, names)

    def _Pass(self, node: ast.Pass, names: Names) -> Ends:
        return {NEXT: (_TRUE, names)}

    def _Break(self, node: ast.Break, names: Names) -> Ends:
        return {BREAK: (_TRUE, names)}

    def _Continue(self, node: ast.Continue, names: Names) -> Ends:
        return {CONTINUE: (_TRUE, names)}

    def _Expr(self, node: ast.Expr, names: Names) -> Ends:
        if not isinstance(node.value, ast.Constant):
            raise self._source.refusal(
                node,
                "expected statements that compute, got an expression whose value goes nowhere",
                _instead(node.value),
            )
        return {NEXT: (_TRUE, names)}

    def _Return(self, node: ast.Return, names: Names) -> Ends:
        if node.value is None:
            raise self._source.refusal(
                node, "expected a value, got a bare return", "return a number"
            )
        return {RETURN: (_TRUE, {RETURN: self._expressions.value(node.value, names)})}

    def _Assign(self, node: ast.Assign, names: Names) -> Ends:
        value = self._expressions.value(node.value, names)
        for target in node.targets:
            names = {**names, **self._expressions.unpacked(target, value)}
        return {NEXT: (_TRUE, names)}

    def _AnnAssign(self, node: ast.AnnAssign, names: Names) -> Ends:
        if node.value is None:
            return {NEXT: (_TRUE, names)}
        value = self._expressions.value(node.value, names)
        return {NEXT: (_TRUE, {**names, **self._expressions.unpacked(node.target, value)})}

    def _AugAssign(self, node: ast.AugAssign, names: Names) -> Ends:
        expressions = self._expressions
        if not isinstance(node.target, ast.Name):
            expressions.unpacked(node.target, None)
        assert isinstance(node.target, ast.Name)
        before = expressions.value(ast.copy_location(ast.Name(node.target.id), node.target), names)
        value = expressions.binary(node.op, node, before, expressions.value(node.value, names))
        return {NEXT: (_TRUE, {**names, node.target.id: plain(value)})}

    def _If(self, node: ast.If, names: Names) -> Ends:
        test = self._expressions.condition(node.test, names)
        if is_const(test):
            return self._block(node.body if test.value else node.orelse, names)
        first, second = self._block(node.body, names), self._block(node.orelse, names)
        ends: Ends = {}
        for kind in {**first, **second}:
            a, b = first.get(kind), second.get(kind)
            if a is not None and b is not None:
                both = joined(test, a[1], b[1], self._source, node)
                ends[kind] = _either(test, a[0], b[0]), both
            elif a is not None:
                ends[kind] = term("and", test, a[0]), a[1]
            elif b is not None:
                ends[kind] = term("and", term("not", test), b[0]), b[1]
        return ends

    def _For(self, node: ast.For, names: Names) -> Ends:
        value = self._expressions.value(node.iter, names)
        if isinstance(value, RowValue):
            return {NEXT: (_TRUE, self._after_row(node, value, names))}
        items = list(self._expressions.items(node.iter, names))
        if len(items) > MAX_STEPS:
            raise self._source.refusal(
                node, f"expected a loop of at most {MAX_STEPS} steps, got {len(items)}", "use fewer"
            )
        steps = iter(items)

        def enter(names: Names) -> tuple[Term, Names]:
            for item in steps:
                return _TRUE, {**names, **self._expressions.unpacked(node.target, item)}
            return const(False), names

        return self._loop(node, names, enter)

    def _after_row(self, node: ast.For, row: RowValue, names: Names) -> Names:
        """Return what names stand for after a loop over a row."""
        items = self._expressions.unpacked(node.target, row.item)
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and _is_stored(n)}
        carried = [name for name in names if name in stored and name not in items]
        leaves = {name: operand(f"{name} so far") for name in carried}
        ends = self._block(node.body, {**names, **leaves, **items})
        again: Ends = {}
        for kind in (CONTINUE, NEXT):
            if kind in ends:
                self._add(again, NEXT, *ends[kind], node)
        if node.orelse or not again or set(ends) & {RETURN, BREAK}:
            raise self._source.refusal(
                node,
                "expected a loop over a row to go over all of it, got one that may end before",
                "compute a condition, and use it in x += f(x) if condition else 0.0",
            )
        after = again[NEXT][1]
        found = {**names, **{name: Unset(name) for name in items}}
        for name in carried:
            found[name] = self._folded(node, row, name, names[name], after[name], leaves)
        return found

    def _folded(
        self, node: ast.For, row: RowValue, name: str, start: Any, end: Any, leaves: dict[str, Term]
    ) -> Any:
        """Return what a name stands for after a loop over a row."""
        if end is leaves[name]:
            return start
        before = as_term(start, self._source, node)
        fold = folded(as_term(end, self._source, node), leaves[name])
        if fold is None or any(depends(fold[1], leaf) for leaf in leaves.values()):
            raise self._source.refusal(
                node,
                f"expected {name!r} to be a total or an extreme in a loop over a row, got another",
                "write total += f(x), best = max(best, f(x)), or itertools.accumulate(row)",
            )
        op, item = fold
        neutral = {"add": 0.0, "max": -math.inf, "min": math.inf}[op]
        item = where_held(RowValue(item, row.condition), neutral)
        assert item is not None
        whole = total_of(item) if op == "add" else extreme_of(op, item)
        return term(op, before, whole)

    def _While(self, node: ast.While, names: Names) -> Ends:
        return self._loop(
            node, names, lambda names: (self._expressions.condition(node.test, names), names)
        )

    def _loop(
        self,
        node: ast.For | ast.While,
        names: Names,
        enter: Callable[[Names], tuple[Term, Names]],
    ) -> Ends:
        """Unroll a loop.

        Args:
            node: The loop.
            names: What names stand for before it.
            enter: Returns whether there is one more step, and the names in it.
        """
        if node.orelse:
            raise self._source.refusal(
                node, "expected a loop, got one with else", "set a flag instead"
            )
        ends: Ends = {}
        live = _TRUE
        for _ in range(MAX_STEPS + 1):
            test, inside = enter(names)
            if not (is_const(test) and test.value):
                outside = term("and", live, term("not", test))
                self._add(ends, NEXT, outside, names, node)
            if is_const(test) and not test.value:
                return ends
            live = term("and", live, test)
            found = self._block(node.body, inside)
            for kind, other in ((RETURN, RETURN), (BREAK, NEXT)):
                if kind in found:
                    condition, there = found[kind]
                    self._add(ends, other, term("and", live, condition), there, node)
            again: Ends = {}
            for kind in (CONTINUE, NEXT):
                if kind in found:
                    self._add(again, NEXT, *found[kind], node)
            if not again:
                return ends
            condition, names = again[NEXT]
            live = term("and", live, condition)
        raise self._source.refusal(
            node,
            f"expected a loop that is known to end after at most {MAX_STEPS} steps, got one that "
            "may go on",
            "count its steps in the condition: while error > 1e-6 and step < 50",
        )


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _either(test: Term, a: Term, b: Term) -> Term:
    """Return the condition of the paths through both sides of an `if`."""
    if a is b:
        return a
    return term("or", term("and", test, a), term("and", term("not", test), b))


_STATEMENTS = "use assignments, if, for, while and return"

_REFUSED: dict[type[ast.stmt], tuple[str, str]] = {
    ast.Global: ("global", "an operator has no side effects: return what it computes"),
    ast.Nonlocal: ("nonlocal", "an operator has no side effects: return what it computes"),
    ast.Delete: ("del", "leave it out: names end with the function"),
    ast.Raise: ("raise", "return math.nan where there is no result"),
    ast.Assert: ("assert", "return math.nan where there is no result"),
    ast.Try: ("try", "test for what would raise, by if"),
    ast.With: ("with", "take out what it manages: only arithmetic is left in a kernel"),
    ast.Import: ("import", "import it outside of the function"),
    ast.ImportFrom: ("import", "import it outside of the function"),
    ast.FunctionDef: ("a function inside a function", "define it outside and call it"),
    ast.ClassDef: ("class", "use numbers and tuples"),
}


def _instead(value: ast.expr) -> str:
    """Return what to write in the place of an expression whose value goes nowhere."""
    if isinstance(value, (ast.Yield, ast.YieldFrom, ast.Await)):
        return "return what it computes, once"
    called = value.func if isinstance(value, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr in ("append", "extend", "insert"):
        return "lists don't grow here: return a comprehension, [f(x) for x in row], or a tuple"
    return "an operator has no side effects, such as printing: remove it"
