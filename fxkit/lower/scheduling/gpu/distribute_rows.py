"""Parallel reduction: the threads of a group take turns along a row, then fold their results."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.index_expressions import IndexValue, binary, equal, less, variable
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest, ThreadMapping
from fxkit.lower.loop_ir.nest_statements import (
    Accumulate,
    Block,
    Define,
    For,
    If,
    LoopKind,
    ReduceThreads,
    Scan,
    Statement,
    guarded,
    walk,
)
from fxkit.lower.scheduling.gpu.nest_pass import NestPass, mapping_of, of_each_thread
from fxkit.lower.scheduling.gpu.scan_threads import scanned_by_threads

# How many elements of a row that is walked are read before the first of them is needed.
UNROLL = 4


@dataclass(frozen=True)
class DistributeRows(NestPass):
    """Distribute each loop over a row over a group of threads.

    Rows that a group holds are walked by a loop that is unrolled, so that what it keeps lies in
    registers; longer ones by a serial loop.

    Before, where eight threads hold a row:

        for j < 20:
          %0: f32 = load in0[20, 1]
          a1 = max(a1, %0)
        %1: f32 = a1
        store out0[1, 0] %1

    After:

        thread t < 8:
          unrolled n < 3:
            j = n * 8 + t
            if j < 20:
              %0: f32 = load in0[20, 1]
              a1 = max(a1, %0)
          a1 = max of a1 over t
          %1: f32 = a1
          if t == 0:
            store out0[1, 0] %1
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with a loop over the threads of each row."""
        if not nest.kernel.folds_rows:
            return nest
        mapping = mapping_of(nest)
        inner = of_each_thread(nest, lambda body: _distributed(nest.kernel, body, mapping))
        if mapping.group == 1:
            return inner
        (block,) = inner.body
        assert isinstance(block, For)
        return replace(inner, body=(replace(block, body=_with_threads(block.body, mapping)),))


def _with_threads(body: Block, mapping: ThreadMapping) -> Block:
    """Put a loop over threads around what they run; the innermost such loop numbers neighbours."""
    if not mapping.is_across and len(body) == 1 and isinstance(body[0], For):
        slots = body[0]
        if slots.kind is LoopKind.THREAD:
            return (replace(slots, body=_with_threads(slots.body, mapping)),)
    return (For("t", mapping.group, LoopKind.THREAD, body),)


def _distributed(kernel: Kernel, body: Block, mapping: ThreadMapping) -> Block:
    result: list[Statement] = []
    for statement in body:
        if not isinstance(statement, For) or statement.kind is not LoopKind.SERIAL:
            is_alone = mapping.group == 1
            result += [statement] if is_alone else guarded(equal(variable("t"), 0), (statement,))
            continue
        result.append(_of_a_group(kernel, statement, mapping))
        if mapping.group > 1:
            result += [
                ReduceThreads(s.reduction, s.array, "t")
                for s in walk(statement.body)
                if isinstance(s, Accumulate) and kernel.body[s.reduction].is_reduction
            ]
    return tuple(result)


def _of_a_group(kernel: Kernel, loop: For, mapping: ThreadMapping) -> For:
    thread: IndexValue = variable("t") if mapping.group > 1 else 0
    if mapping.group > 1 and any(isinstance(s, Scan) for s in walk(loop.body)):
        return scanned_by_threads(kernel, loop, mapping)
    if not mapping.items:
        return replace(loop, begin=thread, step=mapping.group, unroll=UNROLL)
    number = binary("+", binary("*", variable("n"), mapping.group), thread)
    body = loop.body
    if mapping.items * mapping.group != loop.end:
        body = (If(less(variable(loop.var), loop.end), body),)
    body = (Define(loop.var, number), *body)
    return For("n", mapping.items, LoopKind.UNROLLED, body)
