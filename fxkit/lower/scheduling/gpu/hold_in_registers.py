"""Register caching: what the threads of a row keep from one sweep over it to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest, ThreadMapping
from fxkit.lower.loop_ir.nest_statements import (
    LANE,
    Allocate,
    Block,
    Compute,
    For,
    LoopKind,
    Statement,
    StoreLocal,
    rewritten,
    walk,
)
from fxkit.lower.scheduling.gpu.nest_pass import NestPass, mapping_of, of_each_thread
from fxkit.lower.scheduling.gpu.sink_lanes import read_by
from fxkit.lower.scheduling.row_sweeps import SweepPlan, plan_sweeps

# Bytes of registers that a multiprocessor has, and of those that one thread may have.
_REGISTERS, _OWN = 256 * 1024, 512

# A register has four bytes, whatever lies in it.
_REGISTER = 4


@dataclass(frozen=True)
class HoldInRegisters(NestPass):
    """Keep what several sweeps over a row need, as far as half of the registers go.

    Before:

        unrolled n < 3:
          %0: f32 = load in0[20, 1]
          a1 = max(a1, %0)
        unrolled n < 3:
          %0: f32 = load in0[20, 1]
          %2: f32 = sub %0, %1

    After:

        f32 k0[n]
        unrolled n < 3:
          %0: f32 = load in0[20, 1]
          k0 = %0
          a1 = max(a1, %0)
        unrolled n < 3:
          %0: f32 = k0
          %2: f32 = sub %0, %1
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest that loads and computes once what it holds."""
        mapping = mapping_of(nest)
        if not nest.kernel.folds_rows or not mapping.items:
            return nest
        values = held_in_registers(nest.kernel, mapping).values
        return of_each_thread(nest, lambda body: _held(nest.kernel, body, values, mapping))


def _held(kernel: Kernel, body: Block, values: Iterable[int], mapping: ThreadMapping) -> Block:
    loops = [s for s in body if isinstance(s, For) and s.kind is LoopKind.UNROLLED]
    axes = ("n", LANE) if mapping.width > 1 else ("n",)
    arrays: list[Statement] = []
    changed = dict(enumerate(loops))
    for value in values:
        users = [n for n, loop in changed.items() if _computes(loop.body, value)]
        if len(users) < 2:
            continue
        name = f"k{value}"
        arrays.append(Allocate(name, kernel.body[value].dtype, axes))
        for n in users:
            way = _kept if n == users[0] else _recalled
            changed[n] = replace(changed[n], body=way(changed[n].body, value, name))
    new = iter(replace(loop, body=_live(kernel, loop.body)) for loop in changed.values())
    return (*arrays, *(next(new) if s in loops else s for s in body))


def _computes(body: Block, value: int) -> bool:
    return any(isinstance(s, Compute) and s.value == value for s in walk(body))


def _kept(body: Block, value: int, name: str) -> Block:
    def change(statement: Statement) -> Iterable[Statement]:
        is_it = isinstance(statement, Compute) and statement.value == value
        return [statement, StoreLocal(name, value)] if is_it else [statement]

    return rewritten(body, change)


def _recalled(body: Block, value: int, name: str) -> Block:
    def change(statement: Statement) -> Iterable[Statement]:
        is_it = isinstance(statement, Compute) and statement.value == value
        return [Compute(value, name)] if is_it else [statement]

    return rewritten(body, change)


def _live(kernel: Kernel, body: Block) -> Block:
    """Return a block without what it computes and nothing in it reads."""
    needed: set[int] = set()
    for statement in reversed(list(walk(body))):
        is_read = not isinstance(statement, Compute) or _is_needed(kernel, statement.value, needed)
        if is_read:
            needed.update(read_by(kernel, statement))

    def change(statement: Statement) -> Iterable[Statement]:
        if isinstance(statement, Compute) and not _is_needed(kernel, statement.value, needed):
            return []
        return [statement]

    return rewritten(body, change)


def _is_needed(kernel: Kernel, value: int, needed: set[int]) -> bool:
    return value in needed or kernel.body[value].op == "check"


@dataclass(frozen=True)
class Held:
    """Values that are held.

    Attributes:
        room: Bytes of a row that computed values may take together.
        spans: Value → the sweeps that compute it, and that read it last.
    """

    room: int = 0
    spans: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def values(self) -> list[int]:
        """The values, in order."""
        return sorted(self.spans)


def held_in_registers(kernel: Kernel, mapping: ThreadMapping) -> Held:
    """Return what is held of a row, as far as half of the registers go."""
    if not mapping.items:
        return Held()
    elements = mapping.items * mapping.width
    share = min(_OWN, _REGISTERS // mapping.threads) // 2 // elements
    room = share * elements * mapping.group
    plan = plan_sweeps(kernel, room)
    spans = {value: _span(plan, value) for value in plan.buffers}
    for value, instruction in enumerate(kernel.body):
        first, last = _span(plan, value)
        if instruction.op != "load" or not plan.wide[value] or first == last:
            continue
        wider = {**spans, value: (first, last)}
        if _most(kernel, wider) <= share:
            spans = wider
    return Held(room, spans)


def _span(plan: SweepPlan, value: int) -> tuple[int, int]:
    """Return the first and the last sweep that need a value."""
    needed = [n for n, one in enumerate(plan.sweeps) if value in (*one.values, *one.buffered)]
    return (needed[0], needed[-1]) if needed else (0, 0)


def _most(kernel: Kernel, spans: Mapping[int, tuple[int, int]]) -> int:
    """Return the bytes of an element's values that are held at once, at most."""
    last = max(end for _, end in spans.values())
    return max(
        sum(
            max(_REGISTER, kernel.body[value].dtype.itemsize)
            for value, (begin, end) in spans.items()
            if begin <= border < end
        )
        for border in range(last)
    )
