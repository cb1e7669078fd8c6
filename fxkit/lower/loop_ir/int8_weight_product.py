"""A product of floats by a matrix of 8-bit integers as a value of the loop IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxkit.lower.loop_ir.product import Product


@dataclass(frozen=True, slots=True)
class Int8WeightProduct(Product):
    """The detail of an instruction `product` whose right operand is int8; it has no batch."""

    @property
    def way(self) -> str:
        """The only way: what prints it."""
        return "int8_weight_product"

    def evaluated(self, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        """Multiply by torch."""
        left = memory[self.left].as_strided((self.rows, self.depth), self.left_strides)
        right = memory[self.right].as_strided((self.depth, self.columns), self.right_strides)
        return left @ right.to(left.dtype)
