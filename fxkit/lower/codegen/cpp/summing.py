"""Kernels that sweep rows and also reduce over all rows, into column sums.

Rows are split into the same parts, whatever the number of threads. Each part has partial sums of
its own, which stay in a cache while its rows are added to them; at the end the partial sums are
added in float64.
"""

from __future__ import annotations

import math

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.rows import RowPrinter
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuSchedule
from fxkit.lower.scheduling.row_sweeps import RowSweep

# Rows in a part, and in one of a kernel of fewer rows than `FEW`, whose threads want parts too.
# Float32 sums of so many are added up in float64.
PART = 32
SMALL_PART = 8
FEW = 16 * PART

# Columns whose sums are added up at a time.
LANES = 64

_MEMORY = """\
extern "C" void* aligned_alloc(unsigned long alignment, unsigned long size) noexcept;
extern "C" void free(void* memory) noexcept;
"""


class SummingPrinter(RowPrinter):
    """Writes a kernel that handles one row at a time, and adds it to sums."""

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        super().__init__(schedule, name)
        self._sums = [p for p, store in enumerate(schedule.kernel.stores) if store.is_sum]

    def text(self) -> str:
        """Return the function's text."""
        self._open(f'extern "C" long {self._name}({self._parameters()}) {{')
        self._read_numbers()
        self._add("long fault = 0;")
        self._make_sums()
        self._before_tiles()
        self._open_team()
        if not self._is_small:
            self._workshare()
        self._open("for (long part = 0; part < parts; ++part) {")
        self._clear_sums()
        self._add("const long first = part * each, next = first + each;")
        self._add("const long last = next < rows ? next : rows;")
        self._open("for (long tile = first; tile < last; ++tile) {")
        self._tile()
        self._close()
        self._close()
        self._close_team()
        self._add_up()
        self._add("free(memory);")
        self._add("return fault;")
        self._close()
        return _MEMORY + self._taken()

    def _make_sums(self) -> None:
        """Get memory for the sums of all parts, those of one store after those of another."""
        self._add(f"const long rows = {math.prod(self._kernel.outer_sizes)};")
        self._add(f"const long each = rows < {FEW} ? {SMALL_PART} : {PART};")
        self._add("const long parts = (rows + each - 1) / each;")
        self._add(f"const long width = ({self._length} + 15) / 16 * 16;")
        sizes = [f"sizeof({self._sum_type(p)})" for p in self._sums]
        self._add(
            f"char* const memory = (char*)aligned_alloc(64, parts * width * ({' + '.join(sizes)}));"
        )
        self._add("if (!memory) return 1;")
        for place, p in enumerate(self._sums):
            before = f" + parts * width * ({' + '.join(sizes[:place])})" if place else ""
            kind = self._sum_type(p)
            self._add(f"{kind}* const sums{p} = ({kind}*)(memory{before});")

    def _sum_type(self, position: int) -> str:
        return self._type(self._kernel.stores[position].value)

    def _clear_sums(self) -> None:
        for p in self._sums:
            kind = self._sum_type(p)
            self._add(f"{kind}* __restrict const q{p} = sums{p} + part * width;")
            self._open(f"for (long j = 0; j < {self._length}; ++j) {{")
            self._add(f"q{p}[j] = 0;")
            self._close()

    def _store(self, position: int) -> None:
        store = self._kernel.stores[position]
        if store.is_sum:
            place = f"q{position}[j]"
            self._set_at(place, f"{self._value_at(place)} + {self._ref(store.value)}")
        else:
            super()._store(position)

    def _has_near_version(self, one: RowSweep) -> bool:
        """Tell whether a sweep may be repeated; one that adds to sums may not."""
        return not any(p in one.stores for p in self._sums) and super()._has_near_version(one)

    def _add_up(self) -> None:
        """Add up the sums of all parts, for a few columns at a time."""
        self._open(f"for (long first = 0; first < {self._length}; first += {LANES}) {{")
        rest = f"{self._length} - first"
        width = str(LANES)
        if is_runtime(self._length) or self._length % LANES:
            width = f"({rest} < {LANES} ? {rest} : {LANES})"
        self._add(f"const long lanes = {width};")
        for p in self._sums:
            store = self._kernel.stores[p]
            self._open("{")
            self._add(f"double total[{LANES}] = {{}};")
            self._open("for (long part = 0; part < parts; ++part) {")
            self._add("#pragma omp simd")
            self._open("for (long l = 0; l < lanes; ++l) {")
            self._add(f"total[l] += sums{p}[part * width + first + l];")
            self._close()
            self._close()
            self._open("for (long l = 0; l < lanes; ++l) {")
            buffer = self._kernel.buffers[store.access.buffer]
            value = cpp_text.store_expression(f"({self._sum_type(p)})total[l]", buffer.dtype)
            place = f"(first + l) * {store.access.strides[-1]} + {store.access.offset}"
            self._add(f"{buffer.name}[{place}] = {value};")
            self._close()
            self._close()
        self._close()
