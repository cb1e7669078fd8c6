"""Symbolic numbers: stand-ins for numbers that are inputs or results of opaque calls.

Arithmetic on them becomes nodes of the graph; wherever a program uses the number itself, a guard
in the graph expects it to be the same one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

from torch import fx

from fxkit.tracing.recorder.calls import CallSpelling
from fxkit.tracing.values.size_numbers import INFIX, NUMBERS, SizeFloat, SizeInt, any_number, plain

NAME = "fxkit_name"
"""Key of a node's meta: where a number that a graph is given lies, as the user would write it."""

# Where functions that are not pointwise take a number that decides no type: by place or by name.
_DATA: dict[str, frozenset[int | str]] = {
    "full": frozenset({1, "fill_value"}),
    "full_like": frozenset({1, "fill_value"}),
    "new_full": frozenset({2, "fill_value"}),
    "fill": frozenset({1, "value"}),
    "masked_fill": frozenset({2, "value"}),
    "setitem": frozenset({2}),
    "tensor": frozenset({0, "data"}),
    "dropout": frozenset({1, "p"}),
    "bernoulli": frozenset({1, "p"}),
    "normal_": frozenset({1, 2, "mean", "std"}),
    "uniform_": frozenset({1, 2, "from", "to"}),
    "layer_norm": frozenset({4, "eps"}),
    "addmm": frozenset({"beta", "alpha"}),
    "baddbmm": frozenset({"beta", "alpha"}),
    "scaled_dot_product_attention": frozenset({"scale", "dropout_p"}),
}


class Writer(Protocol):
    """What appends to the graph."""

    def append_number(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """Append a node that computes a number, and return the node."""

    def guard_number(self, node: fx.Node, value: Any) -> None:
        """Append a guard that expects a number to be what it was."""

    @property
    def is_following(self) -> bool:
        """Whether the graph still grows."""
        ...


class OpaqueNumbers:
    """Is told what a program does with numbers; see `Listener` of stand-ins."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._fixed: set[fx.Node] = set()

    def stand_in(self, value: Any, node: fx.Node) -> Any:
        """Return what stands for an int or float that a node computes."""
        return (SizeInt if type(value) is int else SizeFloat)(value, node, self)

    def compute(self, target: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Compute a number, and return a stand-in for it."""
        if not self._writer.is_following:
            return target(*plain(operands))
        nodes = tuple([o.fx_node if type(o) in NUMBERS else o for o in operands])
        try:
            value = target(*plain(operands))
        except ArithmeticError:
            for operand in operands:
                if type(operand) in NUMBERS:
                    self.fix(operand)
            raise
        if target is operator.pow:
            self._guard_kind_of_power(operands)
        node = self._writer.append_number(target, nodes, value)
        if type(value) in (int, float):
            return self.stand_in(value, node)
        self._writer.guard_number(node, value)
        return value

    def _guard_kind_of_power(self, operands: tuple[Any, ...]) -> None:
        """Guard what decides whether a power is an int, a float or a complex number."""
        base, exponent = operands
        if type(plain(exponent)) is float:
            is_real = base >= 0  # a guard where the base is a stand-in
            if not is_real and type(exponent) in NUMBERS:
                self.fix(exponent)
        elif type(plain(base)) is int and type(exponent) in NUMBERS:
            self.compute(operator.ge, (exponent, 0))

    def fix(self, number: Any) -> Any:
        """Guard the value of a stand-in, and return it."""
        node = number.fx_node
        if self._writer.is_following and node not in self._fixed:
            self._fixed.add(node)
            self._writer.guard_number(node, number.value)
        return number.value


def without_settings(
    spelling: CallSpelling, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a torch call with stand-ins where numbers can't decide a type.

    All others, such as sizes, axes and indices, are guarded to be the numbers that they are.
    """
    places = _DATA.get(spelling.name, _DATA.get(spelling.name.rstrip("_"), frozenset()))

    def settled(key: int | str, value: Any) -> Any:
        if type(value) in NUMBERS and (spelling.is_pointwise or key in places):
            return value
        return fixed(value)

    return (
        tuple([settled(index, value) for index, value in enumerate(args)]),
        {name: settled(name, value) for name, value in kwargs.items()},
    )


def fixed(value: Any) -> Any:
    """Guard all stand-ins in a nested argument, and return it with numbers in their places."""
    if not any_number(value):
        return value
    _fix_all(value)
    return plain(value)


def _fix_all(value: Any) -> None:
    if type(value) in NUMBERS:
        value.listener.fix(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _fix_all(item)
    elif isinstance(value, dict):
        _fix_all(tuple(value.values()))
    elif isinstance(value, slice):
        _fix_all((value.start, value.stop, value.step))


def number_text(value: Any) -> str:
    """Return what a node computes of numbers, as the user would write it."""
    if not isinstance(value, fx.Node):
        return repr(value)
    sign = INFIX.get(value.target)
    if sign is None or len(value.args) != 2:
        return value.meta.get(NAME, value.name)
    parts = [number_text(arg) for arg in value.args]
    texts = [f"({text})" if " " in text else text for text in parts]
    return f"{texts[0]} {sign} {texts[1]}"
