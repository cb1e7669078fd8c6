"""Kernel → loop nest: loops over its axes, one loop over a row for each of its row sweeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    Accumulate,
    Allocate,
    Block,
    Compute,
    For,
    InitAccumulator,
    LoopKind,
    Scan,
    Statement,
    Write,
)
from fxkit.lower.scheduling.row_sweeps import RowSweep, SweepPlan, plan_sweeps


def plain_nest(kernel: Kernel, *, is_aligned: bool = True) -> LoopNest:
    """Return the loops that compute a kernel as its body says, before any transformation.

    Kernel:

        kernel [9] [20]
          %0: f32 = load in0[20, 1]
          %1: f32 = reduce_max %0
          %2: f32 = sub %0, %1
          store out0[20, 1] %2

    Nest:

        parallel i0 < 9:
          f32 a1
          a1 = neutral element of max
          for j < 20:
            %0: f32 = load in0[20, 1]
            a1 = max(a1, %0)
          %1: f32 = a1
          for j < 20:
            %0: f32 = load in0[20, 1]
            %2: f32 = sub %0, %1
            store out0[20, 1] %2

    Args:
        kernel: The kernel; it has at least one axis.
        is_aligned: Whether each buffer begins at a multiple of sixteen bytes.
    """
    nest = LoopNest(kernel, (), is_aligned)
    if not kernel.folds_rows:
        stores = [Write(position) for position in range(len(kernel.stores))]
        body = (*_computed(kernel, range(len(kernel.body))), *stores)
        outer = zip(nest.axes, kernel.sizes, strict=True)
    else:
        body = _rows(nest)
        outer = zip(nest.axes, kernel.outer_sizes, strict=False)
    return LoopNest(kernel, _within(outer, LoopKind.PARALLEL, body), is_aligned)


def _within(axes: Iterable[tuple[str, int]], kind: LoopKind, body: Block) -> Block:
    """Return a block inside loops over some axes, the first one outermost."""
    for name, size in reversed(list(axes)):
        body = (For(name, size, kind, body),)
    return body


def _rows(nest: LoopNest) -> Block:
    """Return what is computed of one row."""
    kernel = nest.kernel
    plan = plan_sweeps(kernel, 0)
    body: list[Statement] = []
    for one in plan.sweeps:
        body += _computed(kernel, one.scalars)
        if one.reductions or one.stores or _checks(kernel, one):
            body += _sweep(nest, one)
    body += _computed(kernel, plan.scalars)
    return (*body, *(Write(position) for position in row_stores(kernel, plan)))


def _checks(kernel: Kernel, one: RowSweep) -> bool:
    return any(kernel.body[value].op == "check" for value in one.values)


def row_stores(kernel: Kernel, plan: SweepPlan) -> list[int]:
    """Return the positions of the stores that write one element a row."""
    carried = {p for one in plan.sweeps for p in one.stores}
    return [p for p in range(len(kernel.stores)) if p not in carried]


def _sweep(nest: LoopNest, one: RowSweep) -> list[Statement]:
    kernel = nest.kernel
    before: list[Statement] = []
    for p in (*one.reductions, *(p for p in one.values if kernel.body[p].is_scan)):
        before += [Allocate(f"a{p}", sum_dtype(kernel, p)), InitAccumulator(p, f"a{p}")]
    body = (
        *_computed(kernel, one.values),
        *(Write(position) for position in one.stores),
        *(Accumulate(p, f"a{p}") for p in one.reductions),
    )
    row = list(zip(nest.axes, kernel.sizes, strict=True))[len(kernel.outer_sizes) :]
    after = [Compute(p, f"a{p}") for p in one.reductions]
    return [*before, *_within(row, LoopKind.SERIAL, body), *after]


def sum_dtype(kernel: Kernel, reduction: int) -> torch.dtype:
    """Return what a reduction is folded in: sums of float32 in float64."""
    instruction = kernel.body[reduction]
    return torch.float64 if is_float_sum(kernel, reduction) else instruction.dtype


def is_float_sum(kernel: Kernel, reduction: int) -> bool:
    """Tell whether a reduction is a sum of float32."""
    instruction = kernel.body[reduction]
    return instruction.op == "reduce_add" and instruction.dtype == torch.float32


def _computed(kernel: Kernel, values: Iterable[int]) -> list[Statement]:
    return [
        Scan(value, f"a{value}") if kernel.body[value].is_scan else Compute(value)
        for value in values
        if kernel.body[value].op != "const"
    ]
