"""A matrix product of 8-bit integers as a value of the loop IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fxkit.lower.loop_ir.product import Product


@dataclass(frozen=True, slots=True)
class IntegerProduct(Product):
    """The detail of an instruction `product` of integers: `(left - zeros) @ right`, in 32 bits.

    Terms of the left operand lie side by side.

    Attributes:
        zero: The zero point of all rows of the left operand, where they share one.
        zeros: Position of a buffer with one for each row, or None; then there is no batch.
        zeros_stride: Its stride, in elements.
        has_tiles: Whether the processor's tiles multiply; see `matrix_unit`.
    """

    zero: int = 0
    zeros: int | None = None
    zeros_stride: int = 0
    has_tiles: bool = False

    dtype: ClassVar[torch.dtype] = torch.int32

    @property
    def way(self) -> str:
        """The only way: what prints it."""
        return "integer_product"

    @property
    def cost(self) -> int:
        """Estimate of the operations for one element; a fourth of those with floats."""
        return 1 + self.depth // 32

    def evaluated(self, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        """Multiply by torch, in 64 bits; the result is what 32 bits keep of it."""
        left, right = self.matrices(memory)
        zeros: torch.Tensor | int = self.zero
        if self.zeros is not None:
            zeros = memory[self.zeros].as_strided((self.rows, 1), (self.zeros_stride, 0)).long()
        return ((left.long() - zeros) @ right.long()).to(torch.int32)

    def __str__(self) -> str:
        zeros = f"in{self.zeros}" if self.zeros is not None else str(self.zero)
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{times}([{self.rows}, {self.depth}] - {zeros}) @ [{self.depth}, {self.columns}]"
