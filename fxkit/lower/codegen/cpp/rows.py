"""Kernels whose rows are contiguous: vectorised along the row."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.float16_staging import BLOCK as FLOAT16_BLOCK
from fxkit.lower.codegen.cpp.loop_conditions import LoopConditions
from fxkit.lower.codegen.cpp.prefetching import prefetch
from fxkit.lower.codegen.cpp.row_parts import clipped
from fxkit.lower.codegen.cpp.softmax_without_maximum import SoftmaxWithoutMaximum
from fxkit.lower.codegen.cpp.vector_loops import Bounds, Loop
from fxkit.lower.loop_ir.loop_ir import Access
from fxkit.lower.loop_ir.runtime_parameters import ceil_div, is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import PARTS, AlongRows, CpuSchedule
from fxkit.lower.scheduling.cpu.lane_loops import MOST, needed_values
from fxkit.lower.scheduling.cpu.prefetch_rows import ASKED
from fxkit.lower.scheduling.cpu.row_sums import FEW, block_size
from fxkit.lower.scheduling.cpu.split_rows_across_threads import part_length
from fxkit.lower.scheduling.index_intervals import IndexInterval
from fxkit.lower.scheduling.row_sweeps import MAX_BUFFER_BYTES, RowSweep

# What a loop writes for each step besides its results, by how many vectors it then handles at once:
# as many elements as a vector has of these.
_MARKERS = {4: "unsigned char", 2: "unsigned short"}


class RowPrinter(SoftmaxWithoutMaximum):
    """Writes a kernel that handles one row, or a part of a row without reductions, at a time."""

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        super().__init__(schedule, name)
        assert isinstance(schedule.traversal, AlongRows)
        self._length = schedule.kernel.row_sizes[-1]
        self._tile_length, self._is_split = schedule.traversal.tile, schedule.traversal.is_split
        self._tiles = ceil_div(self._length, self._tile_length) if self._tile_length else 1
        self._hoisted = schedule.hoisted
        self._row_sums = schedule.row_sums
        self._conditions = LoopConditions(schedule.kernel)
        self._jammed = schedule.jammed
        self._block = block_size()

    def _attribute(self) -> str:
        if any(map(self._row_sums.has_whole_loops, self._plan.sweeps)):
            return "FX_WHOLE_LOOPS "
        return "FX_SCHEDULED " if self._jammed and self._jammed.is_ordered else ""

    def _workshare_tiles(self) -> None:
        if not self._is_split:
            super()._workshare_tiles()

    def _before_tiles(self) -> None:
        """Print a loop over what the rows have in common, and what they expect of each other."""
        self._declare_expectations()
        common, length = self._hoisted, self._tile_length or self._length
        if not common:
            return
        body = [self._body(value) for value in common.computed]
        self._point_into_buffers(i.detail for i in body if i.op == "load")
        for value in common.kept:
            kind = cpp_text.MEMORY[self._body(value).dtype]
            self._add(f"alignas(64) {kind} c{value}[{length}];")
        self._open("{")
        if self._tile_length:
            self._add("const long begin = 0;")
        bounds = Bounds("0", str(length), length)
        self._vector_loops(bounds, [Loop("#pragma omp simd", self._hoisted_body)])
        self._close()

    def _hoisted_body(self) -> None:
        for value in self._hoisted.computed:
            self._add(f"const {self._type(value)} v{value} = {self._value(value)};")
        for value in self._hoisted.kept:
            self._add(f"{self._hoisted_element(value)} = v{value};")

    def _hoisted_element(self, value: int) -> str:
        """Return the text of an element that the rows have in common."""
        return f"c{value}[{'j - begin' if self._tile_length else 'j'}]"

    def _tile_count(self) -> int:
        return math.prod(self._kernel.outer_sizes) * self._tiles

    def _tile_index(self) -> None:
        row = f"tile / {self._tiles}" if self._tile_length else "tile"
        self._outer_index(row, self._kernel.outer_sizes)
        if self._tile_length:
            full = f"begin + {self._tile_length}"
            self._add(f"const long begin = tile % {self._tiles} * {self._tile_length};")
            self._add(f"const long end = {full} < {self._length} ? {full} : {self._length};")

    def _declare(self) -> None:
        dropped = {value for softmax in self._speculative.values() for value in softmax.dropped}
        for value in sorted({*self._plan.buffers} - dropped):
            size = math.prod(self._kernel.row_sizes)
            if is_runtime(size):
                size = MAX_BUFFER_BYTES // self._body(value).dtype.itemsize
            kind = cpp_text.MEMORY[self._body(value).dtype]
            self._add(f"alignas(64) {kind} b{value}[{size}];")

    def _row_scalars(self, values: Iterable[int], stores: Iterable[int]) -> None:
        self._is_lone = True
        for value in values:
            if self._body(value).op != "const":
                self._add(f"const {self._type(value)} v{value} = {self._value(value)};")
                self._check(value)
        for position in stores:
            self._store(position)
        self._is_lone = False

    def _sweep(self, one: RowSweep) -> None:
        if one in self._speculative:
            self._speculative_sweep(one, self._speculative[one])
        elif self._is_split:
            self._split_sweep(one)
        else:
            bounds = ("begin", "end") if self._tile_length else ("0", self._length)
            self._whole_sweep(one, *bounds)
        for p in one.reductions:
            if self._is_float_sum(p):
                self._add(f"const float s{p} = (float)t{p};")
                if self._facts.is_only_divisor(p):
                    self._add(f"const float inverse{p} = (float)(1.0 / t{p});")

    def _split_sweep(self, one: RowSweep) -> None:
        """Print a sweep over parts of a row, which threads share, and put its results together."""
        names = {p: f"{'t' if self._is_float_sum(p) else 'v'}{p}" for p in one.reductions}
        size = part_length(self._length)
        for p, name in names.items():
            self._add(f"{self._total_type(p)} {name}_of[{PARTS}];")
        self._open_parts(self._length, size)
        self._whole_sweep(one, "first", "last")
        for name in names.values():
            self._add(f"{name}_of[part] = {name};")
        self._close()
        for p, name in names.items():
            self._add(f"{self._total_type(p)} {name} = {name}_of[0];")
        if names:
            self._open(f"for (long part = 1; part < {PARTS}; ++part) {{")
            for p, name in names.items():
                self._fold(p, name, f"{name}_of[part]")
            self._close()

    def _whole_sweep(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        """Print a sweep over a row, or over a part of it."""
        self._declare_accumulators(one)
        self._along_part(one, begin, end)
        self._settle_nans(one)

    def _row_loops(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        self._divided_loops(one, begin, end)

    def _along_row(self, one: RowSweep) -> None:
        self._along_part(one, "0", self._length)

    def _along_part(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        """Print what `_along_row` does for a part of a row."""
        sums = [p for p in one.reductions if self._is_float_sum(p)]
        depth = self._depth
        self._open_row_axes()
        if self._schedule.next_rows and one is self._plan.sweeps[-1]:
            begin, end = self._ask_for_rows(self._schedule.next_rows)
        block = self._sum_block(one)
        if sums and (is_runtime(self._length) or self._length > block):
            begin, end = self._open_blocks(begin, end, block)
        self._is_in_double = bool(sums) and self._row_sums.are_in_double(one)
        for p in sums:
            self._add(f"{'double' if self._is_in_double else 'float'} v{p} = 0;")
        for access, ahead in self._schedule.prefetched.items():
            self._prefetch(access, "0", str(self._length), ahead)
        self._parts = self._schedule.parts_of(one)
        is_jammed = self._jammed is not None and not self._parts
        if is_jammed:
            self._open_steps()
        if self._has_near_version(one):
            self._near_loops(one, begin, end)
        else:
            self._divided_loops(one, begin, end)
        if is_jammed:
            self._add("FX_STEPPED();")
        for p in sums:
            self._add(f"t{p} += v{p};")
        while self._depth > depth:
            self._close()

    def _sum_block(self, one: RowSweep) -> int:
        """Return how many elements a sweep sums up in float32, where it does."""
        is_short = self._lanes_of(one) and self._row_sums.may_repeat(one)
        return FEW * MOST if is_short else self._block

    def _open_steps(self) -> None:
        """Declare what a loop in step writes besides its results."""
        assert self._jammed is not None
        kind = _MARKERS[self._jammed.vectors // self._elements]
        self._add(f"FX_STEPS({kind}, {self._marker_count});")

    @property
    def _elements(self) -> int:
        """How many elements a step of a loop has."""
        return 1

    @property
    def _marker_count(self) -> int:
        return min(self._tile_length or self._length, self._length)

    def _divided_loops(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        """Print the loops of a sweep, for either outcome of a condition that divides them."""
        condition = self._row_sums.divides(one)
        if condition is None:
            self._loops(one, begin, end)
            return
        for holds, opening in ((True, f"if (v{condition}) {{"), (False, "else {")):
            self._open(opening)
            self._conditions.settled = {condition: holds}
            self._loops(one, begin, end)
            self._conditions.settled = {}
            self._close()

    def _loops(self, one: RowSweep, begin: str | int, end: str | int, clause: str = "") -> None:
        """Print the loops of a sweep over a block of the row, those of each stretch.

        Args:
            one: The sweep.
            begin: Where the block begins.
            end: Where it ends.
            clause: A clause for each loop, besides those that what it does asks for.
        """
        for stretch in self._schedule.stretches_of(one):
            first, last = clipped(stretch, begin, end, self._length)
            block = block_size() if one.reductions else FLOAT16_BLOCK
            bounds = Bounds(str(first), str(last), self._most(first, last), block)
            self._enter(stretch)
            if not self._half_loops(one, bounds, clause):
                self._full_loops(one, bounds, begin, clause)
            self._leave()

    def _enter(self, stretch: IndexInterval) -> None:
        """Begin to print what is done along a stretch."""
        self._known = self._conditions.enter(stretch)

    def _leave(self) -> None:
        self._known = {}
        self._conditions.leave()

    def _full_loops(self, one: RowSweep, bounds: Bounds, begin: str | int, clause: str) -> None:
        """Print the loops of a sweep whose elements are computed as they are."""
        body = functools.partial(self._stepped_body, one, begin)
        self._folding_loops(bounds, [self._loop_of(one, one.values, body, clause)])

    def _pragma(self, values: Iterable[int], reductions: Iterable[int], clause: str) -> str:
        """Return what stands before a loop; nothing where it can't become vector code."""
        if any(self._body(p).is_scan for p in values):
            return ""
        return f"#pragma omp simd{clause}{self._clauses(reductions)}{self._fault_clause(values)}"

    def _most(self, begin: str | int, end: str | int) -> int:
        """Return how many elements a loop can have."""
        if str(begin).isdecimal() and str(end).isdecimal():
            return int(end) - int(begin)
        if str(begin) == "block":
            return self._block
        if str(begin) == "from":
            return ASKED
        return self._tile_length or self._length

    def _stepped_body(self, one: RowSweep, begin: str | int) -> None:
        if self._jammed:
            self._add(f"FX_STEP(j - {begin});" if self._tile_length else "FX_STEP(j);")
        self._loop_body(one)

    def _ask_for_rows(self, accesses: Iterable[Access]) -> tuple[str, str]:
        """Open a loop over parts of a row that asks for as much of others, and return its part."""
        length = self._length
        self._open(f"for (long from = 0; from < {length}; from += {ASKED}) {{")
        until = f"from + {ASKED}"
        if length % ASKED:
            self._add(f"const long until = {until} < {length} ? {until} : {length};")
            until = "until"
        for access in accesses:
            self._prefetch(access, "from", until, length)
        return "from", until

    def _prefetch(self, access: Access, begin: str, end: str, ahead: int) -> None:
        """Ask for the lines of a part of a row, so many elements ahead."""
        buffer = self._kernel.buffers[access.buffer]
        size, pointer = buffer.dtype.itemsize, self._pointers[self._key(access)]
        is_awaited = access not in self._streams
        until = f"k < {end}" if is_awaited else f"!is_streamed && k < {end}"
        self._open(f"for (long k = {begin}; {until}; k += {64 // size}) {{")
        self._add(prefetch(f"{pointer} + k + {ahead}", buffer.is_output))
        self._close()

    def _accumulate(self, position: int, into: str) -> None:
        if self._at_once:
            self._accumulate_lanes(position, self._ref(self._body(position).operands[0]))
        elif self._drops_nans(position):
            self._accumulate_extremum(position, into, f"nan{position}")
        else:
            super()._accumulate(position, into)

    def _value(self, position: int) -> str:
        if self._speculated is not None and position == self._speculated.exponent:
            return self._minuend(self._speculated)
        instruction = self._body(position)
        if position in self._known:
            return _truth(self._known[position])
        if instruction.op == "select":
            condition, first, second = instruction.operands
            chosen = self._conditions.outcome(condition)
            if chosen is not None:
                return self._ref(first if chosen else second)
        if self._is_near and cpp_text.is_near_function(instruction):
            operands = ", ".join(map(self._ref, instruction.operands))
            self._add(f"far |= fx_is_far({operands});")
            return f"fx_{instruction.op}_near({operands})"
        if self._row_sums.asks_the_same(position):
            first, second = map(self._ref, instruction.operands)
            return f"fx_{instruction.op}_with({first}, {second})"
        if self._facts.is_softmax_quotient(position):
            value, total = instruction.operands
            if self._facts.is_only_divisor(total):
                inverse = f"inverse{total}"
                return f"{self._ref(value)} * {f'fx_all({inverse})' if self._at_once else inverse}"
            return f"fx_quotient({self._ref(value)}, {self._ref(total)}, 1.0f / {self._ref(total)})"
        return super()._value(position)

    def _loop_body(self, one: RowSweep) -> None:
        values = {*one.values, *one.buffered} - self._hoisted.hidden
        if self._at_once:
            values &= needed_values(self._kernel, one)
        for value in self._conditions.unless_idle(values):
            if self._body(value).is_scan and value not in one.buffered:
                self._accumulate(value, f"a{value}")
            text = self._text_in(one, value)
            self._add(f"const {self._type(value)} v{value} = {text};")
            self._check(value)
        for value in self._conditions.unless_idle(one.keeps):
            self._set_at(f"b{value}[{self._row_offset()}]", f"v{value}")
        for position in one.stores:
            self._store(position)
        for position in one.reductions:
            self._accumulate(position, f"v{position}")

    def _text_in(self, one: RowSweep, value: int) -> str:
        """Return the text of a value that a sweep computes, or reads from a row buffer."""
        if value in self._hoisted.kept:
            element = self._value_at(self._hoisted_element(value))
            return cpp_text.held_expression(element, self._body(value).dtype)
        if value not in one.buffered:
            return self._value(value)
        return self._kept(value)

    def _kept(self, value: int) -> str:
        """Return the text of an element of a row buffer."""
        place = self._value_at(f"b{value}[{self._row_offset()}]")
        return cpp_text.held_expression(place, self._body(value).dtype)

    def _ref(self, position: int) -> str:
        instruction = self._body(position)
        known = self._conditions.outcome(position)
        if known is not None:
            text = _truth(known)
        elif instruction.op == "const":
            text = cpp_text.expression(instruction, [], instruction.dtype)
        else:
            text = f"{'s' if self._is_float_sum(position) else 'v'}{position}"
        return f"fx_all({text})" if self._at_once and not self._plan.wide[position] else text

    def _lane_terms(self, access: Access) -> list[str]:
        return []


def _truth(holds: bool) -> str:
    return "true" if holds else "false"
