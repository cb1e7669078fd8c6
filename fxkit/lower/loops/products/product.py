"""A matrix product as a value of the loop IR."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """A dimension along which products are repeated.

    Attributes:
        size: Number of products.
        left: Stride of the left operand, in elements; 0 where all share one matrix.
        right: Stride of the right operand.
    """

    size: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Product:
    """The detail of an instruction `product`: `left @ right`, for each of a batch.

    A kernel has at most one. Its row is that of the result: as long as the right operand has
    columns, and all outer axes together number the rows, batch by batch.

    Attributes:
        left: Position of the left operand's buffer.
        right: Position of the right operand's buffer.
        batch: The dimensions along which products are repeated, outermost first.
        rows: Rows of one left operand.
        columns: Columns of one right operand.
        depth: Number of terms of each sum.
        left_strides: Strides of the left operand, in elements: from row to row, from term to term.
        right_strides: Strides of the right operand: from term to term, from column to column.
        is_split: Whether each number is split into three of bfloat16, which a processor's matrix
            unit multiplies.
    """

    left: int
    right: int
    batch: tuple[Batch, ...]
    rows: int
    columns: int
    depth: int
    left_strides: tuple[int, int]
    right_strides: tuple[int, int]
    is_split: bool = False

    @property
    def count(self) -> int:
        """Number of matrices that are multiplied."""
        return math.prod(b.size for b in self.batch)

    @property
    def terms(self) -> int:
        """Number of multiplications."""
        return self.count * self.rows * self.columns * self.depth

    @property
    def loads_per_point(self) -> int:
        """Number of loads for one element of the result, where each operand is read once."""
        return self.depth // max(self.rows, 1) + self.depth // max(self.columns, 1)

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{times}[{self.rows}, {self.depth}] @ [{self.depth}, {self.columns}]"
