"""A product by a matrix of 4-bit integers in groups as a value of the loop IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxkit.lower.loop_ir.nibbles import unpacked_nibbles
from fxkit.lower.loop_ir.product import Product


@dataclass(frozen=True, slots=True)
class Int4Product(Product):
    """The detail of an instruction `product` whose right operand holds two integers in a byte.

    Those along a row of it that are neighbours, a group, share a scale and a zero point. It has no
    batch, and terms of the left operand lie side by side. The result is float32.

    Attributes:
        group: How many integers share a scale; even.
        scales: Position of the buffer of scales, float32[columns, groups].
        zero_points: Position of the buffer of zero points, of the same shape; None where all are 0.
        is_float: Whether the left operand is float32, else of 8 bits.
        zero: The zero point of all rows of the left operand, where they share one.
        zeros: Position of a buffer with one for each row, or None.
        zeros_stride: Its stride, in elements.
        has_tiles: Whether the processor's tiles multiply; see `matrix_unit`.
    """

    group: int = 32
    scales: int = 2
    zero_points: int | None = None
    is_float: bool = False
    zero: int = 0
    zeros: int | None = None
    zeros_stride: int = 0
    has_tiles: bool = False

    @property
    def way(self) -> str:
        """The only way: what prints it."""
        return "int4_product"

    @property
    def cost(self) -> int:
        """Estimate of the operations for one element; a fourth of those with floats."""
        return 1 + self.depth // 32

    def evaluated(self, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        """Multiply by torch, groups in float64."""
        left = memory[self.left].as_strided((self.rows, self.depth), self.left_strides).double()
        packed = memory[self.right].as_strided(
            (self.columns, self.depth // 2), (self.depth // 2, 1)
        )
        shape = (self.columns, self.depth // self.group)
        weight = unpacked_nibbles(packed).double().unflatten(1, (-1, self.group))
        if self.zero_points is not None:
            weight = weight - memory[self.zero_points].as_strided(shape, (shape[1], 1))[..., None]
        weight = weight * memory[self.scales].as_strided(shape, (shape[1], 1))[..., None]
        zeros: torch.Tensor | int = self.zero
        if self.zeros is not None:
            zeros = memory[self.zeros].as_strided((self.rows, 1), (self.zeros_stride, 0))
        return ((left - zeros) @ weight.flatten(1).t()).float()

    def __str__(self) -> str:
        zeros = f"in{self.zeros}" if self.zeros is not None else str(self.zero)
        left = f"[{self.rows}, {self.depth}]" + ("" if self.is_float else f" - {zeros}")
        return f"({left}) @ [{self.depth}, {self.columns}] in groups of {self.group}"
