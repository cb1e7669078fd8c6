"""Row loops over float16: staged conversion, bitwise copies, loop fission at roundings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import torch

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.float16_staging import StagedHalves
from fxkit.lower.codegen.cpp.lane_rows import LaneRows
from fxkit.lower.codegen.cpp.vector_loops import Bounds, Loop
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuSchedule
from fxkit.lower.scheduling.cpu.float16_bit_copies import SIGNS, deciding_values, only_moves
from fxkit.lower.scheduling.cpu.float16_loop_fission import LoopPart
from fxkit.lower.scheduling.row_sweeps import RowSweep

# Of shorter rows there is no vector to convert.
SHORT_ROW = 8


class Float16Rows(LaneRows, ABC):
    """Prints loops over rows of halves that are not those of other elements.

    Args:
        schedule: How the kernel is computed.
        name: Name of the function.
    """

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        super().__init__(schedule, name)
        self._known: Mapping[int, bool] = {}
        self._parts: tuple[LoopPart, ...] = ()

    @abstractmethod
    def _text_in(self, one: RowSweep, value: int) -> str:
        """Return the text of a value that a sweep computes, or reads from a row buffer."""

    def _half_loops(self, one: RowSweep, bounds: Bounds, clause: str) -> bool:
        """Print the loops of a sweep if they are others than for other elements.

        Args:
            one: The sweep.
            bounds: Where they begin and end.
            clause: A clause for each loop, besides those that what it does asks for.
        """
        if self._parts:
            loops = [self._part_loop(one, part, clause) for part in self._parts]
            self._folding_loops(bounds, loops, self._kept_types())
        elif self._moves(one):
            pragma = self._pragma(one.values, (), clause)
            self._vector_loops(bounds, [Loop(pragma, lambda: self._move(one))])
        elif self._only_sums(one):
            self._sum(one, bounds)
        else:
            return False
        return True

    def _only_sums(self, one: RowSweep) -> bool:
        """Tell whether a sweep does no more than to sum halves up, in the order of memory."""
        if not self._has_halves or one.stores or one.keeps or not one.reductions:
            return False
        if not is_runtime(self._kernel.row_sizes[-1]) and self._kernel.row_sizes[-1] < SHORT_ROW:
            return False
        loads = [self._body(self._body(p).operands[0]) for p in one.reductions]
        return (
            all(self._is_float_sum(p) for p in one.reductions)
            and all(i.op == "load" and not i.operands for i in loads)
            and all(self._walks_halves(i.detail) for i in loads)
            and not any(self._body(p).op == "check" for p in one.values)
        )

    def _sum(self, one: RowSweep, bounds: Bounds) -> None:
        count = bounds.end if bounds.begin == "0" else f"{bounds.end} - {bounds.begin}"
        for p in one.reductions:
            first = self._first(self._body(self._body(p).operands[0]).detail, bounds.begin)
            self._add(f"v{p} += fx_sum_halves({first}, {count});")

    def _kept_types(self) -> dict[int, str]:
        """Return the values that go from part to part, each with its type."""
        kept = [p for part in self._parts for p in (*part.keeps, *part.rounds)]
        return {p: cpp_text.MEMORY[self._body(p).dtype] for p in kept}

    def _part_loop(self, one: RowSweep, part: LoopPart, clause: str) -> Loop:
        kept = (*part.keeps, *part.rounds, *part.buffers)
        alone = RowSweep((), part.values, part.reads, kept, part.reductions, part.stores)
        loop = self._loop_of(alone, part.checks, lambda: self._part_body(one, part), clause)
        return replace(loop, rounded=part.rounds)

    def _part_body(self, one: RowSweep, part: LoopPart) -> None:
        """Print what a part of a sweep does for an element."""
        assert self._halves is not None
        for value in sorted({*part.reads, *part.values}):
            if value in part.reads:
                place = self._value_at(self._halves.kept(value))
                text = cpp_text.held_expression(place, self._body(value).dtype)
            else:
                text = self._text_in(one, value)
            self._add(f"const {self._type(value)} v{value} = {text};")
        for check in part.checks:
            self._check(check)
        for value in part.keeps:
            self._set_at(self._halves.kept(value), f"v{value}")
        for value in part.rounds:
            operand = self._ref(self._body(value).operands[0])
            self._set_at(self._halves.kept(value), operand)
        for value in part.buffers:
            self._set_at(f"b{value}[{self._row_offset()}]", f"v{value}")
        for position in part.stores:
            self._store(position)
        for position in part.reductions:
            self._accumulate(position, f"v{position}")

    def _moves(self, one: RowSweep) -> bool:
        """Tell whether a sweep does no more than to move halves, which it reads without doubt."""
        if not self._has_halves or not only_moves(self._kernel, one):
            return False
        loads = [self._body(p) for p in one.values if self._body(p).op == "load"]
        guards = [i.guard for i in loads if i.guard is not None and not i.detail.scales]
        return all(
            self._holds(guard) or self._fails(guard) or not self._plan.wide[guard]
            for guard in guards
        )

    def _move(self, one: RowSweep) -> None:
        for value in deciding_values(self._kernel, one):
            self._add(f"const {self._type(value)} v{value} = {self._value(value)};")
            self._check(value)
        for position in one.stores:
            store = self._kernel.stores[position]
            self._add(f"{self._address(store.access)} = {self._bits(store.value)};")

    def _element(self, position: int) -> str:
        """Return the text of the element in memory that a load reads."""
        instruction = self._body(position)
        return self._address(instruction.detail, [self._ref(o) for o in instruction.indices])

    def _bits(self, position: int) -> str:
        """Return the text of the sixteen bits of a half that is moved."""
        instruction = self._body(position)
        operands = instruction.operands
        if instruction.op == "const":
            return cpp_text.float16_literal(instruction.detail.value)
        if instruction.op == "round":
            return self._bits(operands[0])
        if instruction.op in SIGNS:
            return f"(unsigned short)({self._bits(operands[0])} {SIGNS[instruction.op]})"
        if instruction.op == "select":
            first, second = self._bits(operands[1]), self._bits(operands[2])
            return f"({self._ref(operands[0])} ? {first} : {second})"
        access, names = instruction.detail, [self._ref(o) for o in operands]
        text = self._element(position)
        if instruction.guard is None or self._holds(instruction.guard):
            return text
        return f"({names[-1]} ? {text} : {cpp_text.float16_literal(access.otherwise.value)})"

    def _holds(self, guard: int) -> bool:
        instruction = self._body(guard)
        if instruction.op == "const":
            return bool(self._facts.number(guard))
        if instruction.op == "not":
            return self._fails(instruction.operands[0])
        if instruction.op in ("and", "or"):
            sides = [self._holds(o) for o in instruction.operands]
            return all(sides) if instruction.op == "and" else any(sides)
        return self._known.get(guard, False)

    def _fails(self, guard: int) -> bool:
        """Tell whether a guard is known not to hold all along the loop."""
        instruction = self._body(guard)
        if instruction.op == "not":
            return self._holds(instruction.operands[0])
        if instruction.op in ("and", "or"):
            sides = [self._fails(o) for o in instruction.operands]
            return any(sides) if instruction.op == "and" else all(sides)
        return not self._known.get(guard, True)

    def _condition(self, guard: int) -> str | None:
        return None if self._plan.wide[guard] else self._ref(guard)

    def _staged_read(self, position: int) -> str | None:
        access = self._body(position).detail
        is_half = self._kernel.buffers[access.buffer].dtype == torch.float16
        if self._halves is None or not is_half or not access.scales:
            return super()._staged_read(position)
        if position not in self._halves.gathers and not self._gather(position, self._halves):
            return None
        return self._halves.gather(position)

    def _gather(self, position: int, halves: StagedHalves) -> bool:
        """Print a loop that reads the elements of a load one by one, if that can be done apart.

        No compiler makes vector code of a loop that reads two bytes at an index.
        """
        needed: set[int] = set()
        open_ = [*self._body(position).operands]
        while open_:
            operand = open_.pop()
            if self._plan.wide[operand] and operand not in needed:
                needed.add(operand)
                open_ += self._body(operand).operands
        if any(self._body(p).is_scan or p in self._plan.buffers for p in needed):
            return False
        outer, self._lines = self._lines, []
        is_lone, self._is_lone = self._is_lone, True
        self._depth -= 1
        self._open(f"for (long j = {halves.begin}; j < {halves.end}; ++j) {{")
        for value in sorted(needed):
            if self._body(value).op != "const":
                self._add(f"const {self._type(value)} v{value} = {self._value(value)};")
        self._add(f"{halves.gather(position)} = {self._loaded(position)};")
        self._close()
        self._depth += 1
        halves.loops += self._lines
        self._lines, self._is_lone = outer, is_lone
        return True
