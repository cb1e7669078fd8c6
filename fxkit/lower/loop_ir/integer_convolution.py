"""A convolution of 8-bit integers as a value of the loop IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fxkit.lower.loop_ir.convolution import Convolution

# Columns of a panel.
COLUMNS = 64


@dataclass(frozen=True, slots=True)
class IntegerConvolution(Convolution):
    """The detail of an instruction `convolution` or `depthwise` of integers, in 32 bits.

    What lies beyond an image is its zero point, which counts for nothing. The weight of a
    `convolution` is packed into panels of 64 columns: the sums of these in 32 bits, then their
    terms, zeros behind them up to a multiple of 64. That of a `depthwise` one lies as it is.

    Attributes:
        zero: The zero point of the images.
        has_tiles: Whether the processor's tiles multiply; see `matrix_unit`.
        side_by_side: How many terms of a column lie side by side; two have 16 bits each, else 8.
    """

    zero: int = 0
    has_tiles: bool = False
    side_by_side: int = 1

    dtype: ClassVar[torch.dtype] = torch.int32

    @property
    def way(self) -> str:
        """The only way: what prints it."""
        return f"integer_{self.op}"

    @property
    def may_be_winograd(self) -> bool:
        """Tell that it may not: sums would need more than 32 bits."""
        return False

    @property
    def cost(self) -> int:
        """Estimate of the operations for one element; a fourth of those with floats."""
        return 1 + self.depth // 32

    def evaluated(self, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        """Convolve by torch in float64, which holds such sums exactly."""
        values = list(memory)
        values[self.left] = memory[self.left].double() - self.zero
        weight = memory[self.right]
        values[self.right] = (weight if self.channels is None else self._unpacked(weight)).double()
        return Convolution.evaluated(self, values).to(torch.int32)

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the terms of all columns, one column after the other."""
        panels = -(-self.columns // COLUMNS)
        dtype = torch.int16 if self.side_by_side == 2 else torch.int8
        terms = packed.reshape(panels, -1)[:, COLUMNS * 4 :].contiguous().view(dtype)
        terms = terms.reshape(panels, -1, COLUMNS, self.side_by_side).permute(0, 2, 1, 3)
        terms = terms.reshape(panels * COLUMNS, -1)[: self.columns, : self.depth]
        return terms.reshape(-1)

    def __str__(self) -> str:
        return f"{Convolution.__str__(self)} of integers less {self.zero}"
