"""The table of operators that only move elements, or make them from their place.

A row says where the element of the result at an index is read: with arithmetic on indices, under
guards, at computed places. The first parameter is the point of the result; other positional
parameters are operands, keyword-only ones attributes, with the names of ATen's schema.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.index import Index


class Point(Protocol):
    """An element of a result, as a row sees it.

    Attributes:
        index: Its index, a number for each dimension.
        shape: Shape of the result.
        dtype: Dtype of the result.
    """

    index: tuple[Index, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def shape_of(self, operand: Any) -> tuple[int, ...]:
        """Return the shape of an operand."""
        ...

    def is_tensor(self, value: Any) -> bool:
        """Tell whether an argument is a tensor."""
        ...

    def read(self, operand: Any, index: Sequence[Index]) -> Ref:
        """Return an operand's element, in the dtype of the result."""
        ...

    def read_own(self, operand: Any, index: Sequence[Index]) -> Ref:
        """Return an operand's element in the operand's own dtype."""
        ...

    def number(self, value: Number) -> Ref:
        """Return a number in the dtype of the result."""
        ...

    def value(self, index: Index) -> Ref:
        """Return an index as a value, i64."""
        ...

    def place(self, value: Ref) -> Index:
        """Return an integer value as an index."""
        ...

    def require(self, condition: Ref) -> None:
        """Leave the call to eager, which raises, where a condition does not hold."""
        ...

    def below(self, index: Index, bound: int) -> Ref | bool:
        """Tell whether an index is smaller than a bound; True or False where it always is."""
        ...

    def where(
        self, condition: Ref | bool, then: Callable[[], Ref], otherwise: Callable[[], Ref]
    ) -> Ref:
        """Return one of two values; neither touches memory where it is not chosen."""
        ...

    def shown(
        self, view: Callable[..., torch.Tensor], operand: Any, arguments: Mapping[str, Any]
    ) -> tuple[Index, ...]:
        """Return the index into an operand of what a view of it shows at the point."""
        ...

    def divided(self, index: Index, by: int) -> tuple[Index, Index]:
        """Return the quotient and the rest of an index."""
        ...

    def numbered(self, number: Index, shape: Sequence[int]) -> tuple[Index, ...]:
        """Return the index of the element with a number, counted through a shape row by row."""
        ...


@dataclass(frozen=True)
class MoveOp:
    """A row of the table.

    Attributes:
        name: Operator identity.
        build: Returns the element at a point.
        operands: Names of its operands: tensors, lists of tensors, or numbers.
        attributes: Names of its attributes.
        checks: Whether eager raises for some values of its operands.
        in_order: Whether its operand must lie row by row: types do not tell eager's layout else.
        joins: Whether it reads lists of tensors, some of which may be empty.
        pays_alone: Whether a kernel for it alone is faster than eager's.
        tolerance: Largest difference from eager in epsilons, relative to max(1, |result|).
    """

    name: str
    build: Callable[..., Ref]
    operands: tuple[str, ...]
    attributes: tuple[str, ...]
    checks: bool = False
    in_order: bool = False
    joins: bool = False
    pays_alone: bool = True
    tolerance: float = 0


TABLE: dict[str, MoveOp] = {}


def move(
    *names: str,
    checks: bool = False,
    in_order: bool = False,
    pays_alone: bool = True,
    tolerance: float = 0,
) -> Callable[[Callable[..., Ref]], Callable[..., Ref]]:
    """Add an operator that moves elements to the table: the function reads the one for a point.

    Args:
        names: The operators, as `resolve` names them.
        checks: Whether eager raises for some values of the operands.
        in_order: Whether the operand must lie row by row: types do not tell eager's layout else.
        pays_alone: Whether a kernel for it alone is faster than eager's.
        tolerance: Largest difference from eager in epsilons, relative to max(1, |result|). 0: equal
            bits.

    Returns:
        A decorator that returns the function as it is.

    Example:
        >>> from fxkit.lower.operators.movement_table import TABLE, move
        >>> @move("mylib.mirror")
        ... def _mirror(p, self):
        ...     return p.read(self, (*p.index[:-1], p.shape[-1] - 1 - p.index[-1]))
        >>> TABLE.pop("mylib.mirror").operands
        ('self',)
    """

    def add_row(build: Callable[..., Ref]) -> Callable[..., Ref]:
        _, *parameters = inspect.signature(build).parameters.values()
        attributes = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        operands = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        joins = "tensors" in operands
        for name in names:
            TABLE[name] = MoveOp(
                name,
                build,
                operands,
                attributes,
                checks,
                in_order,
                joins,
                pays_alone,
                tolerance,
            )
        return build

    return add_row


def replaced(index: Sequence[Index], d: int, by: Index) -> tuple[Index, ...]:
    """Return an index with another number for one dimension."""
    return (*index[:d], by, *index[d + 1 :])
