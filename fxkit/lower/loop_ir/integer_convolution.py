"""A convolution of 8-bit integers as a value of the loop IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fxkit.lower.loop_ir.convolution import Convolution


@dataclass(frozen=True, slots=True)
class IntegerConvolution(Convolution):
    """The detail of an instruction `convolution` or `depthwise` of integers, in 32 bits.

    What lies beyond an image is its zero point, which counts for nothing. Elements of the weight of
    a `convolution` lie with all their channels.

    Attributes:
        zero: The zero point of the images.
        groups: How many groups of channels are convolved apart; `channels` are those of one.
        has_tiles: Whether the processor's tiles multiply; see `matrix_unit`.
    """

    zero: int = 0
    groups: int = 1
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
        values[self.right] = memory[self.right].double()
        if self.groups == 1:
            return Convolution.evaluated(self, values).to(torch.int32)
        each = self.columns // self.groups
        parts = []
        for group in range(self.groups):
            part = replace(self, columns=each, groups=1)
            begin = group * (self.channels or 1), group * each * self.depth
            own = list(values)
            own[self.left] = _beyond(values[self.left], begin[0])
            own[self.right] = _beyond(values[self.right], begin[1])
            parts.append(Convolution.evaluated(part, own))
        return torch.cat(parts, -1).to(torch.int32)

    def __str__(self) -> str:
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        return f"{Convolution.__str__(self)}{groups} of integers less {self.zero}"


def _beyond(values: torch.Tensor, first: int) -> torch.Tensor:
    """Return what lies in memory from an element on."""
    count = values.untyped_storage().nbytes() // values.itemsize - values.storage_offset() - first
    return values.as_strided((count,), (1,), values.storage_offset() + first)
