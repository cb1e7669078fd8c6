"""Row sweeps: in how many loops over a row a kernel is computed, and what each computes.

A reduction's result is known only after a sweep over the whole row, so a row-wide value belongs to
the first sweep at whose beginning all the row scalars it needs are known. What a later sweep needs
of an earlier one is loaded again, recomputed where that is cheap, or kept in a row buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.kernel_cost import cost_of_scalar

# Row buffers live on the stack and should stay in the first-level cache.
MAX_BUFFER_BYTES = 64 * 1024

# A value of so many operations is computed again rather than kept: a buffer takes a store and a
# load as well.
MAX_RECOMPUTED = 2

# Rows along memory of which a kernel handles several at a time.
MANY_ROWS = 16


@dataclass(frozen=True)
class RowSweep:
    """One sweep over a row.

    Attributes:
        scalars: Row scalars known at its beginning that no earlier sweep knew.
        values: Row-wide values that it computes, in order.
        buffered: Row-wide values that it reads from row buffers.
        keeps: Row-wide values that it writes to row buffers.
        reductions: Reductions that it carries out.
        stores: Positions of the stores that it carries out.
    """

    scalars: tuple[int, ...]
    values: tuple[int, ...]
    buffered: tuple[int, ...]
    keeps: tuple[int, ...]
    reductions: tuple[int, ...]
    stores: tuple[int, ...]

    def __str__(self) -> str:
        parts = {
            "with scalars": self.scalars,
            "reads back": self.buffered,
            "computes": self.values,
            "keeps": self.keeps,
            "reduces": self.reductions,
        }
        words = [f"{does} {_names(values)}" for does, values in parts.items() if values]
        words += [f"store {', '.join(map(str, self.stores))}"] if self.stores else []
        return "; ".join(words)


@dataclass(frozen=True)
class SweepPlan:
    """The sweeps of a kernel.

    Attributes:
        sweeps: In order of execution.
        scalars: Row scalars that are known only after the last sweep.
        wide: For each instruction, whether it is row-wide.
    """

    sweeps: tuple[RowSweep, ...]
    scalars: tuple[int, ...]
    wide: tuple[bool, ...]

    def __str__(self) -> str:
        lines = [f"  sweep {number}: {one}" for number, one in enumerate(self.sweeps)]
        if self.scalars:
            lines.append(f"  after the row: {_names(self.scalars)}")
        return "\n".join(lines)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Row-wide values that have a row buffer, in order."""
        return tuple(sorted({value for p in self.sweeps for value in p.keeps}))


def _names(values: Iterable[int]) -> str:
    return ", ".join(f"%{value}" for value in values)


def plan_sweeps(
    kernel: Kernel, buffer_bytes: int = MAX_BUFFER_BYTES, most_recomputed: int = MAX_RECOMPUTED
) -> SweepPlan:
    """Return the sweeps of a kernel.

    Args:
        kernel: The kernel.
        buffer_bytes: Room for row buffers; what does not fit is computed again.
        most_recomputed: Operations that are computed again where there is room, too.
    """
    return _Scheduler(kernel, buffer_bytes, most_recomputed).run()


class _Scheduler:
    def __init__(self, kernel: Kernel, room: int, most_recomputed: int) -> None:
        self._most_recomputed = most_recomputed
        self._body = kernel.body
        self._kernel = kernel
        self._wide = kernel.row_wide
        self._sweep_of = self._first_sweeps()
        self._loop_sweep_of = [self._loop_sweep(p) for p in range(len(self._body))]
        self._kept = self._choose_buffers(room)

    def run(self) -> SweepPlan:
        last = max(self._loop_sweep_of, default=0)
        for position, store in enumerate(self._kernel.stores):
            if self._wide[store.value] or not self._row_scalar_store(position):
                last = max(last, self._sweep_of[store.value])
        sweeps = [self._sweep(number) for number in range(last + 1)]
        return SweepPlan(tuple(sweeps), tuple(self._scalars_of(last + 1)), tuple(self._wide))

    def _first_sweeps(self) -> list[int]:
        """Return, for each value, the first sweep in which (or before which) it can be computed."""
        result: list[int] = []
        for instruction in self._body:
            number = max(map(result.__getitem__, instruction.operands), default=0)
            result.append(number + instruction.is_reduction)
        return result

    def _loop_sweep(self, position: int) -> int:
        """Return the sweep whose loop a value needs; 0 for a row scalar that needs none."""
        if self._body[position].is_reduction:
            return self._sweep_of[position] - 1
        return self._sweep_of[position] if self._wide[position] else 0

    def _choose_buffers(self, room: int) -> set[int]:
        """Choose the values that a later sweep reads and that cost more than to load."""
        kept: set[int] = set()
        row = math.prod(self._kernel.row_sizes)
        for position in self._crossing():
            size = row * self._body[position].dtype.itemsize
            if size <= room and self._cost(position, set()) > self._most_recomputed:
                kept.add(position)
                room -= size
        return kept

    def _crossing(self) -> Iterator[int]:
        """Yield the row-wide values that a later sweep reads directly."""
        found = set()
        for position, instruction in enumerate(self._body):
            reader = self._loop_sweep_of[position]
            for operand in instruction.operands:
                crosses = self._wide[operand] and self._sweep_of[operand] < reader
                if crosses and self._body[operand].op != "load":
                    found.add(operand)
        yield from sorted(found)

    def _cost(self, position: int, seen: set[int]) -> int:
        """Count the operations that computing a value again would take."""
        if not self._wide[position] or position in seen:
            return 0
        seen.add(position)
        instruction = self._body[position]
        return cost_of_scalar(instruction) + sum(
            self._cost(operand, seen) for operand in instruction.operands
        )

    def _sweep(self, number: int) -> RowSweep:
        reductions = [
            p
            for p, i in enumerate(self._body)
            if i.is_reduction and self._sweep_of[p] == number + 1
        ]
        stores = [
            p
            for p, s in enumerate(self._kernel.stores)
            if self._sweep_of[s.value] == number and not self._row_scalar_store(p)
        ]
        keeps = [p for p in sorted(self._kept) if self._sweep_of[p] == number]
        roots = [self._body[p].operands[0] for p in reductions]
        roots += [self._kernel.stores[p].value for p in stores] + keeps
        roots += [
            p for p, i in enumerate(self._body) if i.op == "check" and self._sweep_of[p] == number
        ]
        values, buffered = self._needed(roots, number)
        return RowSweep(
            tuple(self._scalars_of(number)),
            tuple(values),
            tuple(buffered),
            tuple(keeps),
            tuple(reductions),
            tuple(stores),
        )

    def _row_scalar_store(self, position: int) -> bool:
        """Tell whether a store writes one element a row."""
        store = self._kernel.stores[position]
        rank = len(self._kernel.sizes)
        return not any(store.access.strides[rank - self._kernel.row_rank :]) and bool(
            self._kernel.row_rank
        )

    def _scalars_of(self, number: int) -> list[int]:
        return [
            p
            for p, i in enumerate(self._body)
            if not self._wide[p] and not i.is_reduction and self._sweep_of[p] == number
        ]

    def _needed(self, roots: list[int], number: int) -> tuple[list[int], list[int]]:
        """Return the values that a sweep computes, and those it reads from row buffers."""
        values: set[int] = set()
        buffered: set[int] = set()
        stack = [root for root in roots if self._wide[root]]
        while stack:
            position = stack.pop()
            if position in values or position in buffered:
                continue
            if position in self._kept and self._sweep_of[position] < number:
                buffered.add(position)
                continue
            values.add(position)
            stack += [o for o in self._body[position].operands if self._wide[o]]
        return sorted(values), sorted(buffered)
