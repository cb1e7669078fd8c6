"""Strength reduction: a row is divided by one number as it is multiplied with its reciprocal."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    Block,
    Compute,
    PrecomputeReciprocal,
    Statement,
)
from fxkit.lower.scheduling.gpu.nest_pass import NestPass, mapping_of, of_each_thread


@dataclass(frozen=True)
class HoistReciprocals(NestPass):
    """Invert a number that all of a row is divided by; products are put right by their remainders.

    Before:

        %4: f32 = a4
        unrolled n < 3:
          %5: f32 = div %3, %4

    After:

        %4: f32 = a4
        invert %4
        unrolled n < 3:
          %5: f32 = div %3, %4
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with the inverses of what rows are divided by."""
        if not nest.kernel.folds_rows or mapping_of(nest).is_across:
            return nest
        divisors = _divisors(nest.kernel)

        def change(body: Block) -> Block:
            result: list[Statement] = []
            for statement in body:
                result.append(statement)
                if isinstance(statement, Compute) and statement.value in divisors:
                    result.append(PrecomputeReciprocal(statement.value))
            return tuple(result)

        return of_each_thread(nest, change)


def _divisors(kernel: Kernel) -> set[int]:
    """Return the row scalars that the elements of a row are divided by."""
    wide = kernel.row_wide
    quotients = [
        i.operands
        for i, is_wide in zip(kernel.body, wide, strict=True)
        if is_wide and i.op == "div" and i.dtype == torch.float32
    ]
    by = {divisor for dividend, divisor in quotients if wide[dividend]}
    return {p for p in by if not wide[p] and kernel.body[p].op != "const"}
