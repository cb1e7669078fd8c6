"""How precisely sums of float32 are added: in float32 where a thread adds few, else in steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    Accumulate,
    Allocate,
    For,
    InitAccumulator,
    LoopKind,
    Statement,
    rewritten,
    walk,
)
from fxkit.lower.scheduling.gpu.nest_pass import NestPass, mapping_of
from fxkit.lower.scheduling.gpu.plain_nest import is_float_sum


@dataclass(frozen=True)
class CascadeSums(NestPass):
    """Add float32 in float32 before sums go on in float64, which takes many more cycles.

    What a thread holds of a row is few numbers, and is added in float32 alone. Where it walks a
    row, lanes are added in float32, and their sum in float64.

    Before:

        f64 a1
        a1 = neutral element of add
        for j_tile from t < 10000 step 512 unroll 4:
          lanes l < 4:
            a1 = add(a1, %0)

    After:

        f64 a1
        a1 = neutral element of add
        for j_tile from t < 10000 step 512 unroll 4:
          f32 c1
          c1 = neutral element of add
          lanes l < 4:
            c1 = add(c1, %0)
          a1 = add(a1, c1)
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with sums in steps."""
        if not nest.kernel.folds_rows:
            return nest
        mapping = mapping_of(nest)
        if mapping.items:
            return replace(nest, body=rewritten(nest.body, lambda s: [_narrow(nest, s)]))
        if mapping.is_across or mapping.width == 1:
            return nest
        return replace(nest, body=rewritten(nest.body, lambda s: [_in_steps(nest, s)]))


def _narrow(nest: LoopNest, statement: Statement) -> Statement:
    if not isinstance(statement, Allocate) or not statement.name.startswith("a"):
        return statement
    reduction = int(statement.name[1:])
    if not is_float_sum(nest.kernel, reduction):
        return statement
    return replace(statement, dtype=torch.float32)


def _in_steps(nest: LoopNest, statement: Statement) -> Statement:
    if not isinstance(statement, For) or statement.kind is not LoopKind.SERIAL:
        return statement
    sums = [
        s
        for s in walk(statement.body)
        if isinstance(s, Accumulate) and is_float_sum(nest.kernel, s.reduction)
    ]
    before: list[Statement] = []
    for one in sums:
        chunk = f"c{one.reduction}"
        before += [Allocate(chunk, torch.float32), InitAccumulator(one.reduction, chunk)]

    def change(inner: Statement) -> Iterable[Statement]:
        if isinstance(inner, Accumulate) and inner in sums:
            return [replace(inner, array=f"c{inner.reduction}")]
        return [inner]

    after = [replace(one, source=f"c{one.reduction}") for one in sums]
    return replace(statement, body=(*before, *rewritten(statement.body, change), *after))
