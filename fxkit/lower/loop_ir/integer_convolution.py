"""A convolution of 8-bit integers as a value of the loop IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fxkit.lower.loop_ir.convolution import Convolution
from fxkit.lower.loop_ir.packed_panels import unpacked


@dataclass(frozen=True, slots=True)
class IntegerConvolution(Convolution):
    """The detail of an instruction `convolution` or `depthwise` of integers, in 32 bits.

    What lies beyond an image is its zero point, which counts for nothing. The weight of a
    `convolution` is packed, see `packed_panels`. That of a `depthwise` one lies as it is.

    Attributes:
        zero: The zero point of the images.
        has_tiles: Whether the processor's tiles multiply; see `matrix_unit`.
    """

    zero: int = 0
    has_tiles: bool = False

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
        if self.channels is not None:
            weight = unpacked(weight, self.depth, self.columns).reshape(-1)
        values[self.right] = weight.double()
        return Convolution.evaluated(self, values).to(torch.int32)

    def __str__(self) -> str:
        return f"{Convolution.__str__(self)} of integers less {self.zero}"
