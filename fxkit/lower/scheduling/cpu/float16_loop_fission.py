"""Loop fission for float16: a row sweep is split where a result is rounded to float16.

A processor rounds a vector to float16 in two instructions, which compilers do not generate from a
plain loop. So the loop over a block ends where a result is rounded; an array holds the block, all
of it is rounded, and the next loop reads it. Cheap values, such as loads, are recomputed in each
part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.rounded_values import unrounded
from fxkit.lower.scheduling.kernel_cost import calls_function
from fxkit.lower.scheduling.row_sweeps import RowSweep

# So few roundings by integer arithmetic, beside no function, take no longer than the arrays.
FEW = 3


@dataclass(frozen=True)
class LoopPart:
    """What one loop of a sweep does.

    Attributes:
        reads: Values that it reads from arrays of earlier parts.
        values: Values that it computes, in order.
        keeps: Values that it writes to arrays for later parts.
        rounds: Roundings whose operands it writes to arrays, which are rounded behind the loop.
        checks: Checks that it carries out.
        stores: Positions of the stores that it carries out.
        buffers: Values that it writes to row buffers.
        reductions: Reductions that it carries out.
    """

    reads: tuple[int, ...]
    values: tuple[int, ...]
    keeps: tuple[int, ...]
    rounds: tuple[int, ...]
    checks: tuple[int, ...]
    stores: tuple[int, ...]
    buffers: tuple[int, ...]
    reductions: tuple[int, ...]


def rounded_parts(kernel: Kernel, one: RowSweep) -> tuple[LoopPart, ...]:
    """Return the parts of a sweep, or none where one loop takes no longer, or there are scans."""
    if any(kernel.body[p].is_scan for p in one.values):
        return ()
    cutter = _Cutter(kernel, one)
    is_long = any(calls_function(kernel.body[p]) for p in one.values)
    return cutter.parts() if cutter.roundings >= (1 if is_long else FEW) else ()


class _Cutter:
    def __init__(self, kernel: Kernel, one: RowSweep) -> None:
        self._body = kernel.body
        self._sweep = one
        self._stored = {p: unrounded(kernel, p) for p in one.stores}
        self._checks = [p for p in one.values if kernel.body[p].op == "check"]
        self._inside = {*one.values, *one.buffered}
        live = self._live()
        self._rounds = {p for p in live if self._is_rounding(p)}
        self._level: dict[int, int] = {}
        for p in sorted(live):
            operands = [o for o in self._operands(p) if o in self._inside]
            self._level[p] = max((self._ready(o) for o in operands), default=0)
        self._kept: dict[int, set[int]] = {}

    @property
    def roundings(self) -> int:
        return len(self._rounds)

    def parts(self) -> tuple[LoopPart, ...]:
        last = max(self._ready(p) for p in self._roots() if p in self._inside)
        found = [self._part(level) for level in range(last, -1, -1)]
        return tuple(reversed(found))

    def _is_rounding(self, position: int) -> bool:
        instruction = self._body[position]
        is_computed = position not in self._sweep.buffered
        return is_computed and instruction.op == "round" and instruction.detail == torch.float16

    def _operands(self, position: int) -> tuple[int, ...]:
        return () if position in self._sweep.buffered else self._body[position].operands

    def _roots(self) -> list[int]:
        """Return what a sweep computes for others."""
        operands = [self._body[p].operands[0] for p in self._sweep.reductions]
        return [*self._stored.values(), *self._sweep.keeps, *operands, *self._checks]

    def _live(self) -> set[int]:
        live: set[int] = set()
        open_ = [p for p in self._roots() if p in self._inside]
        while open_:
            position = open_.pop()
            if position not in live:
                live.add(position)
                open_ += [o for o in self._operands(position) if o in self._inside]
        return live

    def _ready(self, position: int) -> int:
        """Return the first part that can use a value."""
        return self._level.get(position, 0) + (position in self._rounds)

    def _is_cheap(self, position: int) -> bool:
        """Tell whether a value is read or computed again in each part that needs it."""
        instruction = self._body[position]
        if position in self._sweep.buffered or instruction.op == "index":
            return True
        if instruction.op == "load":
            return not instruction.operands
        return instruction.dtype == torch.bool and instruction.op != "check"

    def _part(self, level: int) -> LoopPart:
        """Return a part; what it reads is noted for those before it, which come later."""
        stores = [p for p, value in self._stored.items() if self._ready(value) == level]
        buffers = [p for p in self._sweep.keeps if self._ready(p) == level]
        reductions = [
            p for p in self._sweep.reductions if self._ready(self._body[p].operands[0]) == level
        ]
        checks = [p for p in self._checks if self._level[p] == level]
        kept = sorted(self._kept.get(level, ()))
        rounds = [p for p in kept if p in self._rounds]
        needed = [self._stored[p] for p in stores]
        needed += buffers + checks + [p for p in kept if p not in self._rounds]
        needed += [self._body[p].operands[0] for p in (*reductions, *rounds)]
        reads, values = self._closure(needed, level)
        for p in reads:
            self._kept.setdefault(self._level[p], set()).add(p)
        keeps = [p for p in kept if p not in self._rounds]
        groups: list[Iterable[int]] = [reads, values, keeps, rounds]
        groups += [checks, stores, buffers, reductions]
        return LoopPart(*(tuple(sorted(group)) for group in groups))

    def _closure(self, needed: list[int], level: int) -> tuple[set[int], set[int]]:
        """Return what a part reads, and what it computes, to have what is needed."""
        reads: set[int] = set()
        values: set[int] = set()
        open_ = [p for p in needed if p in self._inside]
        while open_:
            position = open_.pop()
            if position in reads or position in values:
                continue
            is_before = position in self._rounds or self._level[position] < level
            if is_before and not self._is_cheap(position):
                reads.add(position)
                continue
            values.add(position)
            open_ += [o for o in self._operands(position) if o in self._inside]
        return reads, values
