"""The policy of fusion: for which regions a kernel is made, and which are left to eager."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.operators.movement_table import MoveOp


@dataclass(frozen=True)
class Policy:
    """For which regions a kernel is made, and which are left to eager.

    Attributes:
        min_members: From this many operators on, a region always becomes a kernel: each operator
            that is fused saves a write to memory and a read.
        rounds: Whether results of 16 bits are rounded within a kernel wherever eager rounds them.
            Otherwise they stay float32 there: faster and nearer to float64, but not eager's bits.
        allows_bf16x3: Whether a float32 product may be computed as products of bfloat16 matrices,
            each operand split into three, where the processor has a matrix unit and that is faster.
    """

    min_members: int = 2
    rounds: bool = True
    allows_bf16x3: bool = False

    @property
    def device(self) -> torch.device:
        """Where kernels run; what lies elsewhere is left to eager."""
        return torch.device("cpu")

    @property
    def sums_over_rows(self) -> bool:
        """Whether kernels that reduce rows take in sums over all rows."""
        return True

    def refusal(self, kernel: Kernel) -> str | None:
        """Return why the target's printer can't print the kernel of a node, or None if it can."""
        return None

    def objection(self, group: FusionGroup) -> str | None:
        """Return why eager is as fast for a region, or None where a kernel is faster."""
        if len(group.members) >= self.min_members:
            return None
        entry = group.members[0].entry
        if isinstance(entry, MoveOp) and not entry.pays_alone:
            return "no neighbour can join it, and alone eager's kernel is as fast"
        if _has_few_rows(group):
            return "no neighbour can join it, and eager divides its rows among threads"
        return None


# From this many elements on, eager divides a row among threads; kernels divide rows only.
_DIVIDED_ROW = 65536


def _has_few_rows(group: FusionGroup) -> bool:
    """Tell whether threads would wait for a kernel that runs along few, long rows."""
    space = group.space
    if not space.reduced or space.points < _DIVIDED_ROW:
        return False
    rows = math.prod(size for axis, size in enumerate(space.sizes) if axis not in space.reduced)
    return 2 * rows < torch.get_num_threads()
