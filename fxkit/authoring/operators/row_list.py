"""The list that a function of rows is given in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

Number = bool | int | float
OfElement = Callable[[float], Number]


class RowList(list[float]):
    """A list of numbers with methods that fold what a function makes of each.

    A row operator that is called on lists hands them to its function so; one that is called on
    tensors reads `row.sum(f)` and the others in its source.

    Example:
        >>> from fxkit.authoring.operators.row_list import RowList
        >>> RowList([1.0, 2.0, 4.0]).sum(lambda x: x * x)
        21.0
    """

    def sum(self, of: OfElement | None = None) -> Number:
        """Return the sum of `of` of each element; of the elements when left out."""
        return sum(self._each(of))

    def max(self, of: OfElement | None = None) -> Number:
        """Return the largest `of` of an element."""
        return max(self._each(of))

    def min(self, of: OfElement | None = None) -> Number:
        """Return the smallest `of` of an element."""
        return min(self._each(of))

    def mean(self, of: OfElement | None = None) -> float:
        """Return the mean of `of` of each element; NaN of no elements."""
        return sum(self._each(of)) / len(self) if self else math.nan

    def _each(self, of: OfElement | None) -> Iterable[Number]:
        return self if of is None else map(of, self)
