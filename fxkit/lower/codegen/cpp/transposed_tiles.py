"""Short or sequential rows as transposed tiles: a tile is turned over, computed, and turned back.

Of long rows, some columns are transposed at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.columns import ColumnPrinter
from fxkit.lower.loop_ir.loop_ir import Access
from fxkit.lower.scheduling.cpu.cpu_schedule import AcrossTransposedRows, CpuSchedule
from fxkit.lower.scheduling.cpu.transpose_rows import lies_along
from fxkit.lower.scheduling.row_sweeps import RowSweep

# With fewer than eight columns, blocks reach into the row that follows: they read there what they
# do not use, and write there what that row writes after them. No block reaches beyond a tile.
BLOCK = 8

# Each lane sums a row of its own, one element after the other: so few in float32, as eager puts
# together what its lanes have summed.
SUMMED_AT_ONCE = 8
TURN = """\
static inline bool fx_turns_block(long row, long stride, long columns, long rows) {
  return row + 8 <= rows &&
         (columns >= 8 || (row + 7) * stride + 8 <= (rows - 1) * stride + columns);
}
static inline long fx_next_block(long column, long columns) {
  return column + 8 >= columns ? columns : column + 16 <= columns ? column + 8 : columns - 8;
}
template <class T> static __attribute__((noinline, noclone)) void fx_turn(
    const T* from, long stride, long columns, long rows, T* to, long lanes) {
  long row = 0;
  for (; fx_turns_block(row, stride, columns, rows); row += 8)
    for (long c = 0; c < columns; c = fx_next_block(c, columns))
      fx_transpose_block(from + row * stride + c, stride, to + c * lanes + row, lanes);
  for (; row < rows; ++row)
    for (long c = 0; c < columns; ++c) to[c * lanes + row] = from[row * stride + c];
}
template <class T> static __attribute__((noinline, noclone)) void fx_turn_back(
    const T* from, long lanes, long columns, long rows, T* to, long stride) {
  long row = 0;
  if (columns >= 8 || columns == stride)
    for (; fx_turns_block(row, stride, columns, rows); row += 8)
      for (long c = 0; c < columns; c = fx_next_block(c, columns))
        fx_transpose_block(from + c * lanes + row, lanes, to + row * stride + c, stride);
  for (; row < rows; ++row)
    for (long c = 0; c < columns; ++c) to[row * stride + c] = from[c * lanes + row];
}
"""


class TransposedTilesPrinter(ColumnPrinter):
    """Writes a kernel whose rows are turned over; its last outer axis numbers them."""

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        super().__init__(schedule, name)
        assert isinstance(schedule.traversal, AcrossTransposedRows)
        self._length, self._chunk = schedule.kernel.sizes[-1], schedule.traversal.columns
        turned = (access for access in self._accesses() if lies_along(access))
        self._turned = {access: f"x{place}" for place, access in enumerate(dict.fromkeys(turned))}

    def _declare(self) -> None:
        super()._declare()
        columns = self._chunk or max(self._length, BLOCK)
        for access, name in self._turned.items():
            element = cpp_text.MEMORY[self._kernel.buffers[access.buffer].dtype]
            self._add(f"alignas(64) {element} {name}[{columns * self._lanes}];")
        if not self._chunk:
            self._turn(self._read(range(len(self._kernel.body))))

    def _narrow_body(self, width: str) -> None:
        super()._narrow_body(width)
        if not self._chunk:
            self._turn_back(self._written(range(len(self._kernel.stores))))

    @property
    def _sum_block(self) -> int:
        return SUMMED_AT_ONCE

    def _walk(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        if not self._chunk:
            super()._walk(one, begin, end)
            return
        self._open(f"for (long chunk = {begin}; chunk < {end}; chunk += {self._chunk}) {{")
        until = f"chunk + {self._chunk}"
        self._add(f"const long chunk_end = {until} < {end} ? {until} : {end};")
        self._turn(self._read(one.values))
        super()._walk(one, "chunk", "chunk_end")
        self._turn_back(self._written(one.stores))
        self._close()

    def _read(self, values: Iterable[int]) -> list[Access]:
        """Return what some of the values read along rows."""
        loads = (self._body(value) for value in values)
        return [i.detail for i in loads if i.op == "load" and i.detail in self._turned]

    def _written(self, stores: Iterable[int]) -> list[Access]:
        """Return what some of the stores write along rows."""
        accesses = (self._kernel.stores[position].access for position in stores)
        return [access for access in accesses if access in self._turned]

    def _turn(self, accesses: list[Access]) -> None:
        """Print what writes columns of operands one behind the other."""
        for access in dict.fromkeys(accesses):
            rows, to = self._first_row(access), self._turned[access]
            shape = f"{access.strides[-2]}, {self._columns}, width"
            self._add(f"fx_turn({rows}, {shape}, {to}, {self._lanes});")

    def _turn_back(self, accesses: list[Access]) -> None:
        """Print what writes columns of results into their rows."""
        for access in dict.fromkeys(accesses):
            rows, name = self._first_row(access), self._turned[access]
            shape = f"{self._lanes}, {self._columns}, width"
            self._add(f"fx_turn_back({name}, {shape}, {rows}, {access.strides[-2]});")

    @property
    def _columns(self) -> str:
        """How many columns are turned over at a time."""
        return "chunk_end - chunk" if self._chunk else str(self._length)

    def _first_row(self, access: Access) -> str:
        """Return where the columns that are turned over begin in a tile's first row."""
        pointer = self._pointers[self._key(access)]
        if access.strides[-1] > 0:
            return f"{pointer} + chunk" if self._chunk else pointer
        return f"{pointer} - ({'chunk_end' if self._chunk else self._length} - 1)"

    def _address(self, access: Access, indices: Iterable[str] = ()) -> str:
        name = self._turned.get(access)
        if name is None:
            return super()._address(access, indices)
        if access.strides[-1] < 0:
            column = f"({'chunk_end' if self._chunk else self._length} - 1 - j)"
        else:
            column = "(j - chunk)" if self._chunk else "j"
        return f"{name}[{column} * {self._lanes} + {self._place}]"

    def _step(self, access: Access) -> int:
        return 1 if access in self._turned else super()._step(access)
