"""Short or sequential rows as transposed tiles: vectorised across neighbouring rows.

A maximum of 5 neighbours, or a softmax of 10, leaves most of a vector along the row idle or waiting
for its own lanes; and each element of a cumulative sum waits for the last one. So a tile of rows is
transposed into a staging buffer first. Each step along the row is then one of full vectors, and a
result along the row is transposed back. Of long rows, some columns are transposed at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.columns import LANES, ColumnPrinter
from fxkit.lower.codegen.cpp.runtime_parameters import is_runtime
from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel
from fxkit.lower.scheduling.row_sweeps import MANY_ROWS, RowSweep, schedule

# Longer rows have enough full vectors of their own; and those that are passed more than once, where
# no vector is left half empty, as their tiles take more of a cache.
LONG_ROW = 256
LONG_PASSED_ROW = 64
LANES_OF_VECTOR = 16
MAX_TILE_BYTES = 1 << 16

# Extrema of shorter rows are found across them; longer ones have full vectors of their own, or
# many, unless a function takes most of the time.
LONG_FULL_ROW = 32
LONG_UNEVEN_ROW = 128

# How long rows are whose sums and products are faster across them, by the bytes of an element: the
# compiler writes shorter ones out, and longer ones have vectors enough.
SUMMED = {1: range(2, 64), 2: range(2, 64), 4: range(5, 32), 8: range(5, 16)}

# Cumulative sums of float32 wait less for their elements than they take to be turned over, where
# shorter rows come from memory; those of float64, which are turned over half as fast, anywhere.
LONG_SUMMED_ROW = 512
CACHED_BYTES = 1 << 21

# Columns of a long row that are turned over at a time, and of how many rows: with more rows, whose
# neighbours lie far apart, memory takes several times as long.
LONG_SCANNED_ROW = 64
CHUNK = 64
LANES_OF_LONG_ROWS = 16

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

    def __init__(self, kernel: Kernel, name: str) -> None:
        self._length = kernel.sizes[-1]
        long = LONG_SCANNED_ROW if kernel.has_scans else LONG_ROW
        self._is_long = is_runtime(self._length) or self._length >= long
        super().__init__(kernel, name)
        self._is_cut = False
        turned = (access for access in self._accesses() if _lies_along(access))
        self._turned = {access: f"x{place}" for place, access in enumerate(dict.fromkeys(turned))}

    def _best_lanes(self) -> int:
        return LANES_OF_LONG_ROWS if self._is_long else LANES

    def _declare(self) -> None:
        super()._declare()
        columns = CHUNK if self._is_long else max(self._length, BLOCK)
        for access, name in self._turned.items():
            element = cpp_text.MEMORY[self._kernel.buffers[access.buffer].dtype]
            self._add(f"alignas(64) {element} {name}[{columns * self._lanes}];")
        if not self._is_long:
            self._turn(self._read(range(len(self._kernel.body))))

    def _narrow_body(self, width: str) -> None:
        super()._narrow_body(width)
        if not self._is_long:
            self._turn_back(self._written(range(len(self._kernel.stores))))

    def _sum_block(self, one: RowSweep) -> int:
        return SUMMED_AT_ONCE

    def _walk(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        if not self._is_long:
            super()._walk(one, begin, end)
            return
        self._open(f"for (long chunk = {begin}; chunk < {end}; chunk += {CHUNK}) {{")
        until = f"chunk + {CHUNK}"
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
        return "chunk_end - chunk" if self._is_long else str(self._length)

    def _first_row(self, access: Access) -> str:
        """Return where the columns that are turned over begin in a tile's first row."""
        pointer = self._pointers[self._key(access)]
        if access.strides[-1] > 0:
            return f"{pointer} + chunk" if self._is_long else pointer
        return f"{pointer} - ({'chunk_end' if self._is_long else self._length} - 1)"

    def _address(self, access: Access, indices: Iterable[str] = ()) -> str:
        name = self._turned.get(access)
        if name is None:
            return super()._address(access, indices)
        if access.strides[-1] < 0:
            column = f"({'chunk_end' if self._is_long else self._length} - 1 - j)"
        else:
            column = "(j - chunk)" if self._is_long else "j"
        return f"{name}[{column} * {self._lanes} + {self._place}]"

    def _step(self, access: Access) -> int:
        return 1 if access in self._turned else super()._step(access)


def is_transposed(kernel: Kernel) -> bool:
    """Tell whether a kernel goes along rows that lie along memory, and is faster across them."""
    if kernel.row_rank != 1 or len(kernel.sizes) < 2:
        return False
    loads = [i for i in kernel.body if i.op == "load" and i.detail.strides[-1]]
    read = [i.detail for i in loads]
    written = [store.access for store in kernel.stores if store.access.strides[-1]]
    return (
        _has_rows(kernel)
        and any(map(_lies_along, read))
        and all(_lies_along(access) or not access.strides[-2] for access in read)
        and all(map(_lies_along, written))
        and not any(i.operands for i in loads)
        and _pays(kernel, {*read, *written})
    )


def _has_rows(kernel: Kernel) -> bool:
    """Tell whether there are rows enough, each of which waits for its own elements."""
    rows, length = kernel.sizes[-2:]
    if kernel.has_scans:
        return not is_runtime(rows) and rows >= MANY_ROWS
    is_short = not is_runtime(length) and 1 < length < LONG_ROW
    is_enough = is_runtime(rows) or rows >= MANY_ROWS
    return is_short and is_enough and kernel.has_reductions


def _lies_along(access: Access) -> bool:
    """Tell whether neighbours in a row are neighbours in memory, and each row is another."""
    *_, apart, step = access.strides
    is_next = not is_runtime(step) and abs(step) == 1
    return is_next and not access.scales and not is_runtime(apart) and apart > 0


def _pays(kernel: Kernel, accesses: set[Access]) -> bool:
    """Tell whether vectors along the rows would be slower."""
    length = kernel.sizes[-1]
    sizes = [kernel.buffers[a.buffer].dtype.itemsize for a in accesses if _lies_along(a)]
    scans = [i for i in kernel.body if i.is_scan]
    if scans:
        return _scan_pays(kernel, scans, max(sizes))
    if sum(sizes) * length * LANES > MAX_TILE_BYTES:
        return False
    is_full = length % LANES_OF_VECTOR == 0
    if len(schedule(kernel, buffer_bytes=0).sweeps) > 1:
        return length < LONG_PASSED_ROW or not is_full
    if all(i.op in _SUMS for i in kernel.body if i.is_reduction):
        return length in SUMMED[min(8, max(sizes))] and not is_full
    if is_full:
        return length < LONG_FULL_ROW
    return length < LONG_UNEVEN_ROW or any(cpp_text.calls_function(i) for i in kernel.body)


def _scan_pays(kernel: Kernel, scans: list[Instruction], itemsize: int) -> bool:
    """Tell whether rows with cumulative operations wait for their elements longer than to turn."""
    if any(i.dtype.is_floating_point and i.op not in _SUMS for i in scans):
        return True
    if itemsize >= 8 or not any(i.dtype.is_floating_point or i.op not in _SUMS for i in scans):
        return False
    length, points = kernel.sizes[-1], kernel.points
    is_small = itemsize < 4 or is_runtime(points) or points * itemsize <= CACHED_BYTES
    return is_small or is_runtime(length) or length >= LONG_SUMMED_ROW


_SUMS = frozenset({"reduce_add", "reduce_mul", "scan_add", "scan_mul"})
