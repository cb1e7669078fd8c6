"""Symbolic scalars: stand-ins for ints and floats that record what is computed of them.

A size that is free, a scalar that is an input of the graph, a scalar that an opaque call gives.

A stand-in behaves as the number that it stands for. Arithmetic on it is written down and gives
another stand-in; whatever else a program does with it (comparing it, printing it, counting up to
it, handing it to a function in C) uses its value, and notes that the value was used.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.truediv: "/",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
"""Operators that stand between their operands, and how they are written."""


class ScalarTracer(Protocol):
    """Writes down what a program does with symbolic scalars."""

    def compute(self, target: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Compute a number, and return a stand-in for it where an operand is one."""

    def fix(self, scalar: Any) -> Any:
        """Note that the value of a stand-in is used, and return it."""


class _Node:
    """What torch asks of a `SymInt` where it has to have a plain number."""

    def __init__(self, number: Any) -> None:
        self._number = number

    def is_int(self) -> bool:
        return isinstance(self._number, SymbolicInt)

    def is_float(self) -> bool:
        return not self.is_int()

    def is_bool(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def int_(self) -> Any:
        return self._number._fix()

    def guard_int(self, file: str, line: int) -> Any:
        return self._number._fix()

    def guard_float(self, file: str, line: int) -> Any:
        return self._number._fix()

    def expect_size(self, file: str, line: int) -> bool:
        return self._number._fix() >= 0


class SymbolicScalar:
    """What stand-ins for ints and floats share.

    Attributes:
        value: The number in this run.
        fx_node: The node that computes it.
        tracer: Is told of what is done with it.
    """

    value: Any
    fx_node: fx.Node
    tracer: ScalarTracer

    def __init__(self, value: Any, fx_node: fx.Node, tracer: ScalarTracer) -> None:
        self.node = _Node(self)
        self.value = value
        self.fx_node = fx_node
        self.tracer = tracer

    def _fix(self) -> Any:
        return self.tracer.fix(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._fix(), name)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (type(self.value), (self._fix(),))


class SymbolicInt(SymbolicScalar, torch.SymInt):
    """Stands for an int; `isinstance(it, int)` holds."""

    __class__ = property(lambda self: int)  # type: ignore[assignment]


class SymbolicFloat(SymbolicScalar, torch.SymFloat):
    """Stands for a float; `isinstance(it, float)` holds."""

    __class__ = property(lambda self: float)  # type: ignore[assignment]


def stand_in(value: Any, node: fx.Node, tracer: ScalarTracer) -> SymbolicScalar:
    """Return what stands for an int or float that a node computes."""
    return (SymbolicInt if type(value) is int else SymbolicFloat)(value, node, tracer)


EXACT = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg),
    *(torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default),
)
"""What gives ints, of ints, as torch's expressions have them."""

SYMBOLIC = (SymbolicInt, SymbolicFloat)
_PLAIN = (int, float)

_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_BY_VALUE = (int, float, complex, math.trunc, str, repr, hash, operator.invert)
_BY_VALUES = (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift, divmod)


def plain(value: Any) -> Any:
    """Return a nested argument of a torch call with numbers in place of stand-ins."""
    kind = type(value)
    if kind in SYMBOLIC:
        return value.value
    if kind is tuple or kind is torch.Size:
        return tuple([plain(item) for item in value]) if has_symbolic(value) else value
    if kind is list:
        return [plain(item) for item in value] if has_symbolic(value) else value
    if kind is dict:
        return {key: plain(item) for key, item in value.items()} if has_symbolic(value) else value
    if kind is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value


def has_symbolic(value: Any) -> bool:
    """Tell whether there is a stand-in in a nested argument."""
    kind = type(value)
    if kind in SYMBOLIC:
        return True
    if isinstance(value, (tuple, list)):
        return any(map(has_symbolic, value))
    if kind is dict:
        return any(map(has_symbolic, value.values()))
    return kind is slice and any(map(has_symbolic, (value.start, value.stop, value.step)))


def _arithmetic(target: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(self: Any, other: Any) -> Any:
        if type(other) not in SYMBOLIC and type(other) not in _PLAIN:
            return _by_value(target, self, other, swap=False)
        return self.tracer.compute(target, (self, other))

    def reflected(self: Any, other: Any) -> Any:
        if type(other) not in SYMBOLIC and type(other) not in _PLAIN:
            return _by_value(target, self, other, swap=True)
        return self.tracer.compute(target, (other, self))

    return forward, reflected


def _by_value(target: Callable[..., Any], number: Any, other: Any, *, swap: bool) -> Any:
    if isinstance(other, torch.Tensor):
        return NotImplemented  # the tensor's own method takes it
    value = number._fix()
    return target(other, value) if swap else target(value, other)


def _comparison(target: Callable[..., Any]) -> Callable[..., Any]:
    def compare(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        if type(other) not in SYMBOLIC and type(other) not in _PLAIN:
            return target(self._fix(), other)
        return self.tracer.compute(target, (self, other))

    return compare


def _fixed(target: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: target(self._fix(), *args)


def _fixed_reflected(target: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: target(other, self._fix())


def _special(function: Callable[..., Any], side: str = "") -> str:
    """Return the name of the method that a function calls."""
    return f"__{side}{function.__name__.strip('_')}__"


def _methods() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for target in INFIX:
        if target in _COMPARISONS:
            found[_special(target)] = _comparison(target)
        else:
            found[_special(target)], found[_special(target, "r")] = _arithmetic(target)
    for target in _BY_VALUE:
        found[_special(target)] = _fixed(target)
    for target in _BY_VALUES:
        found[_special(target)] = _fixed(target)
        found[_special(target, "r")] = _fixed_reflected(target)
    found["__neg__"] = lambda self: self.tracer.compute(operator.neg, (self,))
    found["__bool__"] = lambda self: self != 0
    found["__pos__"] = lambda self: self
    found["__format__"] = lambda self, spec: format(self._fix(), spec)
    found["__round__"] = _fixed(round)
    found["__abs__"] = lambda self: self if self >= 0 else -self
    return found


def _complete(kind: type, extra: dict[str, Callable[..., Any]]) -> None:
    for name, method in {**_methods(), **extra}.items():
        setattr(kind, name, method)


def _whole(target: Callable[..., Any]) -> Callable[..., Any]:
    """Round a quotient of two ints, which torch knows exactly; any other float by its value."""

    def rounded(self: Any) -> Any:
        is_quotient = self.fx_node.target is operator.truediv and all(
            type(operand) is int or getattr(operand, "target", None) in EXACT
            for operand in self.fx_node.args
        )
        return self.tracer.compute(target, (self,)) if is_quotient else target(self._fix())

    return rounded


def _itself(self: Any, digits: Any = None) -> Any:
    return self if digits is None else round(self._fix(), digits)


_complete(
    SymbolicInt,
    {
        "__index__": _fixed(int),
        "__trunc__": _itself,
        "__round__": _itself,
        "__ceil__": _itself,
        "__floor__": _itself,
    },
)
_complete(SymbolicFloat, {"__ceil__": _whole(math.ceil), "__floor__": _whole(math.floor)})
