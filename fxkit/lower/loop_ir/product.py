"""A matrix product as a value of the loop IR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from fxkit.lower.loop_ir.tensor_op import Numbers, TensorOp


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
class Product(TensorOp):
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
        is_bf16x3: Whether each number is split into three of bfloat16, which a processor's matrix
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
    is_bf16x3: bool = False

    @property
    def op(self) -> str:
        """The name of the instruction."""
        return "product"

    @property
    def way(self) -> str:
        """Whether numbers are split, which says what prints it."""
        return "bf16x3_product" if self.is_bf16x3 else self.op

    @property
    def count(self) -> int:
        """Number of matrices that are multiplied."""
        return math.prod(b.size for b in self.batch)

    @property
    def terms(self) -> int:
        """Number of multiplications."""
        return self.count * self.rows * self.columns * self.depth

    @property
    def cost(self) -> int:
        """Estimate of the operations for one element; each operand is read once."""
        loads = self.depth // max(self.rows, 1) + self.depth // max(self.columns, 1)
        return 1 + self.depth // 8 + loads

    def renumbered(self, numbers: Numbers) -> Product:
        """Return it with its sizes and strides replaced."""
        batch = [Batch(*numbers.all_of((b.size, b.left, b.right))) for b in self.batch]
        return replace(
            self,
            batch=tuple(batch),
            rows=numbers.one(self.rows),
            columns=numbers.one(self.columns),
            depth=numbers.one(self.depth),
            left_strides=cast("tuple[int, int]", numbers.all_of(self.left_strides)),
            right_strides=cast("tuple[int, int]", numbers.all_of(self.right_strides)),
        )

    def evaluated(self, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        """Multiply by torch."""
        left, right = self.matrices(memory)
        return left @ right

    def matrices(self, memory: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the operands, [*batch, rows, depth] and [*batch, depth, columns]."""
        sizes = [b.size for b in self.batch]
        left = memory[self.left].as_strided(
            (*sizes, self.rows, self.depth), (*(b.left for b in self.batch), *self.left_strides)
        )
        right = memory[self.right].as_strided(
            (*sizes, self.depth, self.columns),
            (*(b.right for b in self.batch), *self.right_strides),
        )
        return left, right

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{times}[{self.rows}, {self.depth}] @ [{self.depth}, {self.columns}]"
