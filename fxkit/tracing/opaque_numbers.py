"""Stand-ins for numbers that opaque calls gave.

Arithmetic on them becomes nodes of the graph; wherever a program uses the number itself, a guard
in the graph expects it to be the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import fx

from fxkit.tracing.size_numbers import NUMBERS, SizeFloat, SizeInt, plain


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
        node = self._writer.append_number(target, nodes, value)
        if type(value) in (int, float):
            return self.stand_in(value, node)
        self._writer.guard_number(node, value)
        return value

    def fix(self, number: Any) -> Any:
        """Guard the value of a stand-in, and return it."""
        node = number.fx_node
        if self._writer.is_following and node not in self._fixed:
            self._fixed.add(node)
            self._writer.guard_number(node, number.value)
        return number.value
