"""Fission and interchange: loops over lanes become innermost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    LANE,
    Accumulate,
    Allocate,
    Block,
    Compute,
    For,
    LoopKind,
    Scan,
    Statement,
    StoreLocal,
    Write,
    rewritten,
    walk,
)
from fxkit.lower.scheduling.gpu.nest_pass import NestPass


@dataclass(frozen=True)
class SinkLanes(NestPass):
    """Give each run of statements within lanes lanes of its own, inside of serial loops.

    What one run computes and another one reads becomes an array with an element for each lane.

    Before:

        lanes l < 4:
          f64 a1
          a1 = neutral element of add
          for j < 30:
            %0: f32 = load in0[1, 40]
            a1 = add(a1, %0)
          %1: f32 = a1
          store out0[1, 0] %1

    After:

        f64 a1[l]
        lanes l < 4:
          a1 = neutral element of add
        for j < 30:
          lanes l < 4:
            %0: f32 = load in0[1, 40]
            a1 = add(a1, %0)
        lanes l < 4:
          %1: f32 = a1
          store out0[1, 0] %1
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with lanes innermost."""

        def change(statement: Statement) -> Iterable[Statement]:
            if not isinstance(statement, For) or statement.kind is not LoopKind.LANES:
                return [statement]
            has_loops = any(isinstance(s, For) for s in statement.body)
            return _sunk(nest.kernel, statement) if has_loops else [statement]

        return replace(nest, body=rewritten(nest.body, change))


def _sunk(kernel: Kernel, lanes: For) -> Block:
    body = _distributed(lanes, lanes.body)
    shared = _shared(kernel, body)
    arrays = [s for s in lanes.body if isinstance(s, Allocate)]
    return (
        *(replace(s, axes=(*s.axes, LANE)) for s in arrays),
        *(Allocate(f"v{value}", kernel.body[value].dtype, (LANE,)) for value in shared),
        *body,
    )


def _distributed(lanes: For, body: Block) -> Block:
    """Return a block whose runs of statements are in lanes, and whose loops hold such blocks."""
    result: list[Statement] = []
    run: list[Statement] = []

    def close() -> None:
        if run:
            result.append(replace(lanes, body=tuple(run)))
            run.clear()

    for statement in body:
        if isinstance(statement, For):
            close()
            result.append(replace(statement, body=_distributed(lanes, statement.body)))
        elif not isinstance(statement, Allocate):
            run.append(statement)
    close()
    return tuple(result)


def _shared(kernel: Kernel, body: Block) -> list[int]:
    """Return the values that one run of lanes computes and another one reads."""
    runs = [s for s in walk(body) if isinstance(s, For) and s.kind is LoopKind.LANES]
    found: set[int] = set()
    for run in runs:
        own = {s.value for s in walk(run.body) if isinstance(s, Compute)}
        found |= {v for s in walk(run.body) for v in read_by(kernel, s)} - own
    return sorted(v for v in found if kernel.body[v].op != "const")


def read_by(kernel: Kernel, statement: Statement) -> tuple[int, ...]:
    """Return the values of the kernel that a statement itself reads."""
    match statement:
        case Compute(value, None):
            return kernel.body[value].operands
        case Compute(value, _):
            is_load = kernel.body[value].op == "load"
            return kernel.body[value].operands if is_load else ()
        case Scan(value):
            return kernel.body[value].operands
        case Write(store):
            return (kernel.stores[store].value,)
        case Accumulate(reduction, _, None):
            return kernel.body[reduction].operands
        case StoreLocal(_, value):
            return (value,)
        case _:
            return ()
