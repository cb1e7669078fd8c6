"""Kernels whose reduced axis is not the innermost in memory: vectorised across neighbouring rows.

A sum over the first of two dimensions is one: its rows are the columns of a matrix. A tile is some
neighbouring rows, one a vector lane; each row scalar is an array with an element for each lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.kernel_printer import KernelPrinter, scaled
from fxkit.lower.codegen.cpp.vector_loops import Bounds, Loop
from fxkit.lower.loop_ir.loop_ir import Access
from fxkit.lower.loop_ir.runtime_parameters import ceil_div, is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import PARTS, AcrossRows, CpuSchedule
from fxkit.lower.scheduling.row_sweeps import RowSweep

# Float sums are kept in float64 from one block of this many elements of a row to the next. The sums
# of 64 numbers of one sign would err 2.5 times as much as torch's.
BLOCK = 16


class ColumnPrinter(KernelPrinter):
    """Writes a kernel that handles several rows at a time; its last outer axis numbers them.

    Args:
        schedule: How the kernel is computed.
        name: Name of the function.
    """

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        kernel, traversal = schedule.kernel, schedule.traversal
        super().__init__(kernel, name, schedule.plan)
        assert isinstance(traversal, AcrossRows)
        self._rows = kernel.outer_sizes[-1]
        self._lanes, self._is_split = traversal.rows, traversal.is_split
        self._is_tiled = is_runtime(self._rows) or self._rows > self._lanes
        self._tiles = ceil_div(self._rows, self._lanes)
        self._lane_axis = len(kernel.outer_sizes) - 1

    def _workshare_tiles(self) -> None:
        if not self._is_split:
            super()._workshare_tiles()

    def _tile_count(self) -> int:
        return math.prod(self._kernel.outer_sizes[:-1]) * self._tiles

    def _tile_index(self) -> None:
        row = f"tile / {self._tiles}" if self._is_tiled else "tile"
        self._outer_index(row, self._kernel.outer_sizes[:-1])
        self._add(f"const long i{self._lane_axis} = tile % {self._tiles} * {self._lanes};")

    def _tile_body(self) -> None:
        """Print a tile of as many rows as it always has, and one of the rows that are left."""
        if not is_runtime(self._rows) and (not self._is_tiled or self._rows % self._lanes == 0):
            self._narrow_body(str(min(self._lanes, self._rows)))
            return
        rest = f"{self._rows} - i{self._lane_axis}"
        self._open(f"if ({rest} >= {self._lanes}) {{")
        self._narrow_body(str(self._lanes))
        self._close()
        self._open("else {")
        self._narrow_body(rest)
        self._close()

    def _narrow_body(self, width: str) -> None:
        self._add(f"const long width = {width};")
        super()._tile_body()

    def _declare(self) -> None:
        for position, instruction in enumerate(self._kernel.body):
            if instruction.is_scan:
                self._add(f"alignas(64) {self._type(position)} a{position}[{self._lanes}];")
            if not self._plan.wide[position] and instruction.op != "const":
                self._declare_lanes(position)

        for value in self._plan.buffers:
            size = math.prod(self._kernel.row_sizes) * self._lanes
            self._add(f"alignas(64) {self._type(value)} b{value}[{size}];")

    def _declare_lanes(self, position: int) -> None:
        """Declare a row scalar, and what it is computed with."""
        self._add(f"alignas(64) {self._type(position)} v{position}[{self._lanes}];")
        if self._is_float_sum(position):
            self._add(f"alignas(64) double t{position}[{self._lanes}];")
        if self._notes_nans(position):
            self._add(f"alignas(64) {self._flag(position)} nan{position}[{self._lanes}];")

    def _open_lanes(self) -> None:
        self._add("#pragma omp simd")
        self._open("for (long l = 0; l < width; ++l) {")

    def _row_scalars(self, values: Iterable[int], stores: Iterable[int]) -> None:
        computed = [value for value in values if self._body(value).op != "const"]
        stores = list(stores)
        if not (computed or stores):
            return

        def body() -> None:
            for value in computed:
                self._add(f"v{value}[l] = {self._value(value)};")
                self._check(value)
            for position in stores:
                self._store(position)

        self._along_lanes(computed, body)

    def _along_lanes(self, values: Iterable[int], body: Callable[[], None]) -> None:
        """Print a loop over the rows of a tile, which may read and write halves."""
        pragma = f"#pragma omp simd{self._fault_clause(values)}"
        self._vector_loops(Bounds("0", "width", self._lanes, self._lanes), [Loop(pragma, body)])

    def _sweep(self, one: RowSweep) -> None:
        if self._is_split:
            self._split_sweep(one)
        else:
            self._whole_sweep(one, 0, self._kernel.row_sizes[-1])
        sums = [p for p in one.reductions if self._is_float_sum(p)]
        if sums:
            self._open_lanes()
            for p in sums:
                self._add(f"v{p}[l] = (float)t{p}[l];")
            self._close()

    def _split_sweep(self, one: RowSweep) -> None:
        """Print a sweep over parts of the rows, which threads share; put its results together."""
        names = {p: f"{'t' if self._is_float_sum(p) else 'v'}{p}" for p in one.reductions}
        length = self._kernel.row_sizes[0]
        size = ceil_div(length, PARTS * BLOCK) * BLOCK
        for p, name in names.items():
            kind = "double" if self._is_float_sum(p) else self._type(p)
            self._add(f"alignas(64) {kind} {name}_of[{PARTS}][{self._lanes}];")
        self._open_parts(length, size)
        for p in one.reductions:
            self._declare_lanes(p)
        self._whole_sweep(one, "first", "last")
        self._open_lanes()
        for name in names.values():
            self._add(f"{name}_of[part][l] = {name}[l];")
        self._close()
        self._close()
        self._open_lanes()
        for name in names.values():
            self._add(f"{name}[l] = {name}_of[0][l];")
        self._close()
        self._open(f"for (long part = 1; part < {PARTS}; ++part) {{")
        self._open_lanes()
        for p, name in names.items():
            self._fold(p, f"{name}[l]", f"{name}_of[part][l]")
        self._close()
        self._close()

    def _whole_sweep(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        """Print a sweep over the rows, or over a part of them."""
        sums = [p for p in one.reductions if self._is_float_sum(p)]
        self._start(one.reductions, sums)
        self._start_scans(p for p in one.values if self._body(p).is_scan)
        depth = self._depth
        self._open_row_axes()
        length = self._kernel.row_sizes[-1]
        if sums and (is_runtime(length) or length > self._sum_block):
            begin, end = self._open_blocks(begin, end, self._sum_block)
        self._walk(one, begin, end)
        if sums:
            self._open_lanes()
            for p in sums:
                self._add(f"t{p}[l] += v{p}[l];")
                self._add(f"v{p}[l] = 0;")
            self._close()
        while self._depth > depth:
            self._close()
        noting = [p for p in one.reductions if self._notes_nans(p)]
        if noting:
            self._open_lanes()
            for p in noting:
                nan = cpp_text.literal(math.nan, self._body(p).dtype)
                self._add(f"v{p}[l] = nan{p}[l] ? {nan} : v{p}[l];")
            self._close()

    @property
    def _sum_block(self) -> int:
        """How many elements of a row are summed in float32, before float64 goes on."""
        return BLOCK

    def _walk(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        """Print the loop along a block of the rows."""
        self._open(f"for (long j = {begin}; j < {end}; ++j) {{")
        self._along_lanes(one.values, lambda: self._loop_body(one))
        self._close()

    def _loop_body(self, one: RowSweep) -> None:
        for value in sorted({*one.values, *one.buffered}):
            is_kept = value in one.buffered
            if self._body(value).is_scan and not is_kept:
                self._accumulate(value, f"a{value}[l]")
            text = self._kept(value) if is_kept else self._value(value)
            self._add(f"const {self._type(value)} v{value} = {text};")
            self._check(value)
        for value in one.keeps:
            self._set_at(self._place_of(value), f"v{value}")
        for position in one.stores:
            self._store(position)
        for position in one.reductions:
            if self._drops_nans(position):
                self._accumulate_extremum(position, f"v{position}[l]", f"nan{position}[l]")
            else:
                self._accumulate(position, f"v{position}[l]")

    def _kept(self, value: int) -> str:
        """Return the text of an element that an earlier sweep kept.

        To the functions of the C library vectors are other code than the elements that are left
        over: what they compute a second time may differ in its last bit.
        """
        element = self._value_at(self._place_of(value))
        return cpp_text.held_expression(element, self._body(value).dtype)

    def _place_of(self, value: int) -> str:
        return f"b{value}[({self._row_offset()}) * {self._lanes} + l]"

    def _start(self, reductions: Iterable[int], sums: list[int]) -> None:
        """Set accumulators to where their reductions start."""
        reductions = list(reductions)
        if not reductions:
            return
        self._open_lanes()
        for p in reductions:
            start = cpp_text.identity_of(self._monoid(p), self._body(p).dtype)
            self._add(f"v{p}[l] = {start};")
            if p in sums:
                self._add(f"t{p}[l] = 0;")
            if self._notes_nans(p):
                self._add(f"nan{p}[l] = 0;")
        self._close()

    def _start_scans(self, scans: Iterable[int]) -> None:
        for p in scans:
            start = cpp_text.identity_of(self._monoid(p), self._body(p).dtype)
            self._open_lanes()
            self._add(f"a{p}[l] = {start};")
            self._close()

    def _scanned(self, position: int) -> str:
        return f"a{position}[l]"

    def _ref(self, position: int) -> str:
        if self._body(position).op == "const":
            return self._value(position)
        return f"v{position}" if self._plan.wide[position] else f"v{position}[l]"

    def _lane_terms(self, access: Access) -> list[str]:
        stride = access.strides[self._lane_axis]
        return [scaled(self._place, stride)] if stride else []

    def _step(self, access: Access) -> int:
        return access.strides[self._lane_axis]

    @property
    def _variable(self) -> str:
        return "l"

    @property
    def _index_in_row(self) -> str:
        return "j"
