"""Parallel scan: threads fold a part of a row each, and learn what came before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fxkit.lower.loop_ir.index_expressions import binary, less, variable
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import ThreadMapping
from fxkit.lower.loop_ir.nest_statements import (
    LANE,
    Accumulate,
    Allocate,
    Block,
    Compute,
    Define,
    For,
    If,
    InitAccumulator,
    LoopKind,
    Scan,
    ScanThreads,
    Statement,
    walk,
)
from fxkit.lower.scheduling.gpu.sink_lanes import read_by


def scanned_by_threads(kernel: Kernel, loop: For, mapping: ThreadMapping) -> For:
    """Return a loop over a row that scans, distributed over the threads `t` of a group.

    In each iteration all threads are there: they fold their own elements, scan the results, and go
    on from what came before. Values that one of these steps computes and a later one reads are kept
    in local arrays.

    Before:

        for j < 80:
          %0: f32 = load in0[80, 1]
          %1: f32 = a1 = add(a1, %0)
          store out0[80, 1] %1

    After, for 32 threads:

        unrolled n < 3:
          f32 v0
          j = n * 32 + t
          f32 b1
          b1 = neutral element of add
          if j < 80:
            %0: f32 = load in0[80, 1]
            b1 = add(b1, %0)
          b1, a1 = add before and after b1 over t
          if j < 80:
            %1: f32 = b1 = add(b1, %0)
            store out0[80, 1] %1
    """
    within, body = _opened(loop)
    axes = (LANE,) if within is not None else ()
    number = binary("+", binary("*", variable("n"), mapping.group), variable("t"))
    rounds = -(-loop.extent // mapping.group)
    has_all = rounds * mapping.group == loop.extent

    def inside(run: Block) -> Block:
        lanes = run if within is None else within(run)
        if has_all:
            return lanes
        condition = less(variable(loop.var), loop.end)
        return (If(condition, (*_defines(loop), *lanes)),)

    steps = _steps(body)
    result: list[Statement] = [
        Allocate(f"v{value}", kernel.body[value].dtype, axes) for value in _crossing(kernel, steps)
    ]
    result.append(Define(loop.var, number))
    result += _defines(loop) if has_all else ()
    for step in steps[:-1]:
        scan = step[-1]
        assert isinstance(scan, Accumulate)
        own = scan.array
        dtype = kernel.body[scan.reduction].dtype
        result += [Allocate(own, dtype), InitAccumulator(scan.reduction, own), *inside(step)]
        result.append(ScanThreads(scan.reduction, own, f"a{scan.reduction}", "t"))
    result += inside(steps[-1])
    kind = LoopKind.UNROLLED if mapping.items else LoopKind.SERIAL
    return For("n", rounds, kind, tuple(result))


def _opened(loop: For) -> tuple[Callable[[Block], Block] | None, Block]:
    """Return what puts statements into lanes, if the loop has them, and the statements."""
    last = loop.body[-1]
    if isinstance(last, For) and last.kind is LoopKind.LANES:
        return (lambda run: (replace(last, body=run),)), last.body
    return None, loop.body


def _defines(loop: For) -> Block:
    return tuple(s for s in loop.body if isinstance(s, Define))


def _steps(body: Block) -> list[Block]:
    """Cut statements at each scan: a step ends with what folds its operand, the next scans."""
    steps: list[list[Statement]] = [[]]
    for statement in body:
        if isinstance(statement, Scan):
            own = f"b{statement.value}"
            steps[-1].append(Accumulate(statement.value, own))
            steps.append([replace(statement, array=own)])
        elif not isinstance(statement, Define):
            steps[-1].append(statement)
    return [tuple(step) for step in steps]


def _crossing(kernel: Kernel, steps: list[Block]) -> list[int]:
    """Return the values that a step computes and a later one reads."""
    found: set[int] = set()
    for step in steps:
        own = {s.value for s in walk(step) if isinstance(s, Compute | Scan)}
        found |= {v for s in walk(step) for v in read_by(kernel, s)} - own
    wide = kernel.row_wide
    return sorted(v for v in found if wide[v])
