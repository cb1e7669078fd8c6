"""Reading a function whose source is not to be had: it is called with scalars that record.

Where it asks whether a scalar holds, it is called again for the other answer, so that all paths are
known; what each returns is chosen by the answers that lead there.
"""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxkit.authoring.operators.callables import FUNCTIONS, power
from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.primitives import is_bool, substituted, term, truth
from fxkit.authoring.operators.terms import Term, const, is_const, number, operand
from fxkit.authoring.operators.values import Names, is_number, plain
from fxkit.errors import UnsupportedError

# A function of more paths, or more questions on one of them, is refused.
_MAX_PATHS, _MAX_QUESTIONS = 500, 200

# What Python raises where a function does something to scalars that they have not.
_FAULTS = (
    TypeError, AttributeError, ValueError, ArithmeticError, LookupError, NameError, RecursionError,
)  # fmt: skip


class _Paths:
    """The questions of one call, and their answers.

    Args:
        answers: Those to begin with; all further ones are yes.
        place: Where the function stands, for refusals.
    """

    def __init__(self, answers: Sequence[bool], place: str) -> None:
        self._place = place
        self.answers = list(answers)
        self.questions: list[Term] = []

    def holds(self, found: Term) -> bool:
        condition = truth(found)
        if is_const(condition):
            return bool(condition.value)
        if condition in self.questions:
            return self.answers[self.questions.index(condition)]
        if len(self.questions) >= _MAX_QUESTIONS:
            raise UnsupportedError(
                f"expected loops that are known to end after at most {_MAX_QUESTIONS} steps, got "
                "one that may go on",
                source=self._place,
                hint="count its steps in the condition: while error > 1e-6 and step < 50",
            )
        self.questions.append(condition)
        if len(self.answers) < len(self.questions):
            self.answers.append(True)
        return self.answers[len(self.questions) - 1]


class Scalar:
    """A scalar that records what is computed of it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, found: Term, paths: _Paths) -> None:
        self.term = found
        self._paths = paths

    def __bool__(self) -> bool:
        return self._paths.holds(self.term)

    def made(self, found: Term) -> Any:
        """Return a term as a scalar, or the number that it is."""
        value = plain(found)
        return Scalar(value, self._paths) if isinstance(value, Term) else value

    def __pow__(self, other: Any) -> Any:
        return self._of_two(power, self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._of_two(power, other, self)

    def __neg__(self) -> Any:
        return self.made(term("neg", self.term))

    def __pos__(self) -> Any:
        return self

    def __invert__(self) -> Any:
        return self.made(term("bit_not", self.term))

    def __abs__(self) -> Any:
        return self.made(term("abs", self.term))

    def __round__(self, digits: None = None) -> Any:
        return NotImplemented if digits is not None else self.made(term("rint", self.term))

    def _of_two(self, function: Callable[[Term, Term], Term], a: Any, b: Any) -> Any:
        if not all(isinstance(value, Scalar) or is_number(value) for value in (a, b)):
            return NotImplemented
        return self.made(function(_term(a), _term(b)))


def _binary(op: str) -> Callable[[Term, Term], Term]:
    def applied(a: Term, b: Term) -> Term:
        if op in ("bit_and", "bit_or") and is_bool(a) and is_bool(b):
            return term(op.removeprefix("bit_"), a, b)
        return term(op, a, b)

    return applied


_ARITHMETIC = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv",
    "mod": "mod", "and": "bit_and", "or": "bit_or", "xor": "bit_xor", "lshift": "shl",
    "rshift": "shr",
}  # fmt: skip

for _name, _op in _ARITHMETIC.items():
    _apply = _binary(_op)
    setattr(Scalar, f"__{_name}__", lambda a, b, f=_apply: a._of_two(f, a, b))
    setattr(Scalar, f"__r{_name}__", lambda a, b, f=_apply: a._of_two(f, b, a))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _apply = _binary(_name)
    setattr(Scalar, f"__{_name}__", lambda a, b, f=_apply: a._of_two(f, a, b))


def traced(function: Callable[..., Any], arguments: Names) -> Any:
    """Return what a function returns: a term, a number or a tuple of these.

    Args:
        function: A Python function; it is run, once for each of its paths.
        arguments: Terms and numbers by the names of its parameters.

    Raises:
        UnsupportedError: When it does something to a scalar that kernels do not have.
    """
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    runs = 0

    def explored(answers: Sequence[bool]) -> Any:
        nonlocal runs
        runs += 1
        if runs > _MAX_PATHS:
            raise UnsupportedError(f"expected at most {_MAX_PATHS} paths, got more", source=place)
        paths = _Paths(answers, place)
        found = _run(function, arguments, paths, place)
        for position in reversed(range(len(answers), len(paths.questions))):
            other = explored([*paths.answers[:position], False])
            found = _chosen(paths.questions[position], found, other, place)
        return found

    return explored([])


def _run(function: Any, arguments: Names, paths: _Paths, place: str) -> Any:
    given = {
        name: Scalar(value, paths) if isinstance(value, Term) else value
        for name, value in arguments.items()
    }
    try:
        return _result(_StandIns(paths).of_function(function)(**given), place)
    except _FAULTS as error:
        raise UnsupportedError(
            f"expected arithmetic of scalars in {function.__name__}, whose source is not to be "
            f"had, got: {error}",
            source=place,
            hint="put it into a file or a notebook cell, where it is read line by line",
        ) from error


def _result(value: Any, place: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_result(each, place) for each in value)
    if isinstance(value, Scalar):
        return value.term
    if is_number(value):
        return value
    raise UnsupportedError(
        f"expected scalars to be returned, got {type(value).__name__}",
        source=place,
        hint="return a number, or a tuple of numbers",
    )


def _chosen(condition: Term, a: Any, b: Any, place: str) -> Any:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_chosen(condition, x, y, place) for x, y in zip(a, b, strict=True))
    if isinstance(a, tuple) or isinstance(b, tuple):
        raise UnsupportedError(
            "expected as many results on all paths, got different numbers of them",
            source=place,
            hint="return tuples of one length",
        )
    return plain(term("select", condition, _term(a), _term(b)))


def _term(value: Any) -> Term:
    if isinstance(value, Scalar):
        return value.term
    return value if isinstance(value, Term) else const(value)


class _StandIns:
    """What a function finds in the place of functions of Python, of `math` and of its own.

    Args:
        paths: Where the scalars that they make ask.
    """

    def __init__(self, paths: _Paths) -> None:
        self._paths = paths
        self._made: dict[int, Callable[..., Any]] = {}

    def of_function(self, function: Any) -> Callable[..., Any]:
        """Return a function of Python that finds stand-ins where it looks."""
        if id(function) in self._made:  # it calls itself
            return self._made[id(function)]
        code, outside = function.__code__, function.__globals__
        names = {
            f.__name__: _recording(f, self._paths)
            for f in FUNCTIONS
            if hasattr(builtins, f.__name__)
        }
        inside: dict[str, Any] = {"__builtins__": {**vars(builtins), **names}}
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        made = types.FunctionType(code, inside, function.__name__, function.__defaults__, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        self._made[id(function)] = made
        for name in code.co_names:
            if name in outside:
                inside[name] = self.of(outside[name])
        for cell, known in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self.of(known.cell_contents)
        return made

    def of(self, value: Any) -> Any:
        """Return what stands for a value from outside; most stand for themselves."""
        if value is math:
            known = {name: self.of(each) for name, each in vars(math).items()}
            return types.SimpleNamespace(**known)
        definition = getattr(value, "definition", None)
        if isinstance(definition, Definition):
            return functools.partial(_operator, value, definition, self._paths)
        if isinstance(value, (types.BuiltinFunctionType, type)) and value in FUNCTIONS:
            return _recording(value, self._paths)
        return self.of_function(value) if isinstance(value, types.FunctionType) else value


def _recording(function: Callable[..., Any], paths: _Paths) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        is_one = function in (max, min) and len(args) == 1
        values = tuple(args[0]) if is_one else args
        if kwargs or not any(isinstance(value, Scalar) for value in values):
            return function(values, **kwargs) if is_one else function(*args, **kwargs)
        found = plain(FUNCTIONS[function](*map(_term, values)))
        return Scalar(found, paths) if isinstance(found, Term) else found

    return recorded


def _operator(
    called: Callable[..., Any], definition: Definition, paths: _Paths, *args: Any, **kwargs: Any
) -> Any:
    given: Mapping[str, Any] = {
        **definition.numbers,
        **dict(zip((p.name for p in definition.parameters), args, strict=False)),
        **kwargs,
    }
    if not any(isinstance(value, Scalar) for value in given.values()):
        return called(*args, **kwargs)
    leaves = {
        operand(p.name) if p.is_tensor else number(p.name): _term(given[p.name])
        for p in definition.parameters
    }
    results = substituted(definition.results, leaves)
    found = tuple(Scalar(result, paths) for result in results)
    return found if definition.is_tuple else found[0]
