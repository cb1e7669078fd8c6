"""Reading Python expressions as terms."""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fxkit.authoring.operators.callables import power
from fxkit.authoring.operators.primitives import is_bool, term, truth
from fxkit.authoring.operators.row_calls import METHODS
from fxkit.authoring.operators.row_values import RowMethod, RowValue
from fxkit.authoring.operators.source import FunctionSource
from fxkit.authoring.operators.source_calls import CallReader
from fxkit.authoring.operators.terms import Term, const, is_const
from fxkit.authoring.operators.values import (
    LocalFunction,
    Names,
    Unset,
    as_term,
    is_number,
    plain,
)

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "bit_and",
    ast.BitOr: "bit_or",
    ast.BitXor: "bit_xor",
    ast.LShift: "shl",
    ast.RShift: "shr",
}

_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}

# How Python spells the other comparisons.
_SPELT: dict[type[ast.cmpop], str] = {
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}

_OUTSIDE = "compute it outside and pass it as a number, or spell it with those"

# What an expression that is not read is called, and what to write in its place.
_UNKNOWN: dict[type[ast.expr], tuple[str, str]] = {
    ast.NamedExpr: ("an assignment inside of one", "assign on a line of its own: y = x * 2"),
    ast.Dict: ("a dict", "give each value a name of its own"),
    ast.DictComp: ("a dict", "give each value a name of its own"),
    ast.Set: ("a set", "write x == 1 or x == 2"),
    ast.SetComp: ("a set", "write x == 1 or x == 2"),
    ast.Slice: ("a slice", "a row is read as a whole: [f(x) for x in row], or sums of it"),
    ast.JoinedStr: ("a text", "an operator computes numbers"),
    ast.Yield: ("yield", "return what it computes, once"),
    ast.Await: ("await", "return what it computes, once"),
}


class ExpressionReader:
    """Reads the expressions of one function.

    Args:
        source: The function.
        call: Reads a call of a Python function: of it, its arguments by name, and the node.
    """

    def __init__(self, source: FunctionSource, call: Callable[..., Any]) -> None:
        self.source = source
        self.calls = CallReader(source, call)

    def value(self, node: ast.expr, names: Names) -> Any:
        """Return what an expression stands for."""
        read = getattr(self, f"_{type(node).__name__}", None)
        if read is None:
            what, instead = _UNKNOWN.get(type(node), (type(node).__name__, _OUTSIDE))
            raise self.source.refusal(
                node,
                f"expected arithmetic, comparisons, calls and conditional expressions, got {what}",
                instead,
            )
        return plain(read(node, names))

    def term(self, node: ast.expr, names: Names) -> Term:
        """Return an expression as a term."""
        return as_term(self.value(node, names), self.source, node)

    def condition(self, node: ast.expr, names: Names) -> Term:
        """Return whether an expression is other than zero."""
        return truth(self.term(node, names))

    def _Constant(self, node: ast.Constant, names: Names) -> Any:
        if not is_number(node.value):
            kind = type(node.value).__name__
            raise self.source.refusal(
                node, f"expected a real number, got {kind}", "write an int or float"
            )
        return node.value

    def _Name(self, node: ast.Name, names: Names) -> Any:
        if node.id in names:
            value = names[node.id]
            if isinstance(value, Unset):
                raise self.source.refusal(
                    node,
                    f"expected {node.id!r} to be set on every path, got a path without",
                    f"set {node.id} before the branch or loop",
                )
            return value
        outside = self.source.outside
        if node.id in outside:
            return self._outside_value(outside[node.id], node.id, node)
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        raise self.source.refusal(
            node,
            f"expected a name that is known when the operator is defined, got {node.id!r}",
            "define it above, or make it a parameter",
        )

    def _outside_value(self, value: Any, name: str, node: ast.AST) -> Any:
        if isinstance(value, (bool, int, float, tuple, list, types.ModuleType)) or callable(value):
            return tuple(value) if isinstance(value, list) else value
        item = getattr(value, "item", None)
        if item is not None and type(value).__module__ == "numpy":
            return item()
        raise self.source.refusal(
            node,
            f"expected {name!r} to be a number or a function, got {type(value).__name__}",
            "make it a parameter of the operator if it is a tensor, else a number",
        )

    def _Attribute(self, node: ast.Attribute, names: Names) -> Any:
        owner = self.value(node.value, names)
        if isinstance(owner, RowValue):
            return self._method(node, owner)
        if not isinstance(owner, types.ModuleType):
            kind = "a scalar" if isinstance(owner, Term) else type(owner).__name__
            raise self.source.refusal(
                node,
                f"expected an attribute of a module such as math, got .{node.attr} of {kind}",
                "scalars have no methods here: write math.exp(x), not x.exp()",
            )
        if not hasattr(owner, node.attr):
            raise self.source.refusal(
                node, f"expected an attribute of {owner.__name__}, got {node.attr!r}", "spell it"
            )
        return self._outside_value(getattr(owner, node.attr), f"{owner.__name__}.{node.attr}", node)

    def _method(self, node: ast.Attribute, row: RowValue) -> RowMethod:
        if node.attr not in METHODS:
            raise self.source.refusal(
                node,
                f"expected {', '.join(METHODS)} of a row, got .{node.attr}",
                "write row.sum(lambda x: ...), or a comprehension: [f(x) for x in row]",
            )
        if not row.is_given:
            raise self.source.refusal(
                node,
                f"expected .{node.attr} of a row that is a parameter, got it of a list",
                f"lists of Python have no such method: pass the function to row.{node.attr}, or "
                f"write {node.attr}(...)"
                if node.attr != "mean"
                else "divide its sum by len(row)",
            )
        return RowMethod(node.attr, row)

    def _Tuple(self, node: ast.Tuple | ast.List, names: Names) -> tuple[Any, ...]:
        return tuple(self.value(element, names) for element in node.elts)

    _List = _Tuple

    def _Subscript(self, node: ast.Subscript, names: Names) -> Any:
        owner, index = self.value(node.value, names), self.value(node.slice, names)
        if not isinstance(owner, tuple) or type(index) is not int:
            raise self.source.refusal(
                node,
                "expected an element of a tuple at a known position, got another index",
                "operands are scalars: an operator can't read neighbours of an element",
            )
        if not -len(owner) <= index < len(owner):
            raise self.source.refusal(
                node, f"expected an index below {len(owner)}, got {index}", "correct the index"
            )
        return owner[index]

    def _UnaryOp(self, node: ast.UnaryOp, names: Names) -> Any:
        if isinstance(node.op, ast.Not):
            return term("not", self.condition(node.operand, names))
        value = self.term(node.operand, names)
        if isinstance(node.op, ast.UAdd):
            return value
        return term("neg" if isinstance(node.op, ast.USub) else "bit_not", value)

    def _BinOp(self, node: ast.BinOp, names: Names) -> Any:
        return self.binary(
            node.op, node, self.value(node.left, names), self.value(node.right, names)
        )

    def binary(self, op: ast.operator, node: ast.AST, left: Any, right: Any) -> Any:
        """Return what a binary operator of Python makes of two values."""
        if isinstance(left, tuple) and isinstance(right, tuple) and isinstance(op, ast.Add):
            return left + right
        a, b = (as_term(value, self.source, node) for value in (left, right))
        if isinstance(op, ast.Pow):
            return power(a, b)
        if type(op) not in _BINARY:
            raise self.source.refusal(
                node, "expected arithmetic, got a product of matrices", "use *"
            )
        name = _BINARY[type(op)]
        if name in ("floordiv", "mod", "div") and is_const(a) and is_const(b, 0):
            raise self.source.refusal(node, "expected a divisor, got 0", "correct the divisor")
        if name.startswith("bit_") and is_bool(a) and is_bool(b) and name != "bit_xor":
            return term(name.removeprefix("bit_"), a, b)
        return term(name, a, b)

    def _Compare(self, node: ast.Compare, names: Names) -> Any:
        other = next((op for op in node.ops if type(op) not in _COMPARED), None)
        if other is not None:
            raise self.source.refusal(
                node,
                f"expected a comparison of numbers, got {_SPELT[type(other)]}",
                "compare with <, <=, ==, !=, >= or >: x == 1 or x == 2, not x in (1, 2)",
            )
        values = [self.term(each, names) for each in (node.left, *node.comparators)]
        found = const(True)
        for op, left, right in zip(node.ops, values, values[1:], strict=False):
            found = term("and", found, term(_COMPARED[type(op)], left, right))
        return found

    def _BoolOp(self, node: ast.BoolOp, names: Names) -> Any:
        is_and = isinstance(node.op, ast.And)
        found = self.term(node.values[0], names)
        for each in node.values[1:]:
            if is_const(found):
                if bool(found.value) == is_and:
                    found = self.term(each, names)
                continue
            other = self.term(each, names)
            if is_bool(found) and is_bool(other):
                found = term("and" if is_and else "or", found, other)
            else:
                pair = (other, found) if is_and else (found, other)
                found = term("select", truth(found), *pair)
        return found

    def _IfExp(self, node: ast.IfExp, names: Names) -> Any:
        condition = self.condition(node.test, names)
        if is_const(condition):
            return self.value(node.body if condition.value else node.orelse, names)
        then, otherwise = self.term(node.body, names), self.term(node.orelse, names)
        return term("select", condition, then, otherwise)

    def _GeneratorExp(self, node: ast.GeneratorExp | ast.ListComp, names: Names) -> Any:
        if len(node.generators) != 1:
            raise self.source.refusal(node, "expected one for, got several", "write a loop")
        generator = node.generators[0]
        value = self.value(generator.iter, names)
        if isinstance(value, RowValue):
            return self._of_row(node.elt, generator, value, names)
        return tuple(self._generated(node.elt, generator, names))

    _ListComp = _GeneratorExp

    def _of_row(
        self, element: ast.expr, generator: ast.comprehension, row: RowValue, names: Names
    ) -> RowValue:
        """Return the list that a comprehension makes of a row."""
        inner = {**names, **self.unpacked(generator.target, row.item)}
        conditions = [self.condition(test, inner) for test in generator.ifs]
        if row.condition is not None:
            conditions.insert(0, row.condition)
        held = conditions[0] if conditions else None
        for condition in conditions[1:]:
            held = term("and", held or condition, condition)
        return RowValue(self.value(element, inner), held)

    def _generated(
        self, element: ast.expr, generator: ast.comprehension, names: Names
    ) -> Iterator[Any]:
        for item in self.items(generator.iter, names):
            inner = {**names, **self.unpacked(generator.target, item)}
            conditions = [self.condition(test, inner) for test in generator.ifs]
            if not all(map(is_const, conditions)):
                raise self.source.refusal(
                    element, "expected a condition that is known, got one of operands", "use a loop"
                )
            if all(condition.value for condition in conditions):
                yield self.value(element, inner)

    def items(self, node: ast.expr, names: Names) -> Iterable[Any]:
        """Return what a loop goes over."""
        value = self.value(node, names)
        if isinstance(value, (range, tuple, enumerate, zip, reversed)):
            return list(value)
        if isinstance(value, RowValue):
            raise self.source.refusal(
                node,
                "expected a loop over a range or tuple, got one over a row",
                "write sum(f(x) for x in row), max(...) or [f(x) for x in row]",
            )
        raise self.source.refusal(
            node,
            "expected a range or tuple that is known when the operator is defined, got another",
            "loop over range(n) with a number n, and leave early by break",
        )

    def unpacked(self, target: ast.expr, value: Any) -> dict[str, Any]:
        """Return what assigning a value to a target sets."""
        if isinstance(target, ast.Name):
            return {target.id: value}
        if isinstance(target, (ast.Tuple, ast.List)):
            if not isinstance(value, tuple) or len(value) != len(target.elts):
                raise self.source.refusal(
                    target, f"expected a tuple of {len(target.elts)} values, got another", "match"
                )
            found: dict[str, Any] = {}
            for part, each in zip(target.elts, value, strict=True):
                found |= self.unpacked(part, each)
            return found
        raise self.source.refusal(
            target,
            "expected an assignment to a local variable, got one to an attribute or element",
            "an operator has no side effects: return what it computes",
        )

    def _Call(self, node: ast.Call, names: Names) -> Any:
        callee = self.value(node.func, names)
        args: list[Any] = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                args += self.items(arg.value, names)
            else:
                args.append(self._argument(arg, names))
        kwargs = {str(k.arg): self._argument(k.value, names) for k in node.keywords}
        return self.calls.result(callee, tuple(args), kwargs, node)

    def _argument(self, node: ast.expr, names: Names) -> Any:
        """Return an argument of a call, which alone may be a lambda.

        What a lambda finds around it is what it would find when it is called there and then.
        """
        if not isinstance(node, ast.Lambda):
            return self.value(node, names)
        given = node.args
        if given.vararg or given.kwarg or given.kwonlyargs or given.defaults:
            raise self.source.refusal(
                node,
                "expected a lambda of plain parameters, got one of defaults, stars or keywords",
                "name each parameter: lambda x, y: ...",
            )
        parameters = [each.arg for each in (*given.posonlyargs, *given.args)]
        return LocalFunction(
            len(parameters),
            lambda args: self.value(
                node.body, {**names, **dict(zip(parameters, args, strict=True))}
            ),
        )

    def _Lambda(self, node: ast.Lambda, names: Names) -> Any:
        raise self.source.refusal(
            node,
            "expected a lambda as the argument of a call, got one elsewhere",
            "pass it where it is called, or define the function outside, with def",
        )
