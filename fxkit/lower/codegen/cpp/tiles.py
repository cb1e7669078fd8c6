"""Tiles of two axes, the row and one that crosses it, of which transposed operands are staged."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.kernel_printer import KernelPrinter, scaled
from fxkit.lower.codegen.cpp.prefetching import prefetch
from fxkit.lower.codegen.cpp.vector_loops import Bounds, Loop
from fxkit.lower.loop_ir.loop_ir import Access, Instruction
from fxkit.lower.loop_ir.runtime_parameters import ceil_div, is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuSchedule, InCrossingTiles
from fxkit.lower.scheduling.cpu.tile_crossing_axes import crossed_by
from fxkit.lower.scheduling.row_sweeps import RowSweep

# How many rows ahead a tile asks for what lies along its rows: their pieces are too short for the
# hardware to foresee the next one.
AHEAD = 8

# Turns a tile of `rows` times `columns` elements over. Blocks of 8 by 8 go through registers; lane
# i of row k of a block becomes lane k of row i in three steps, each of which exchanges the halves
# of ever smaller groups of rows. No hardware foresees lines that lie so far apart: they are asked
# for two blocks ahead, at the end of a tile for the next one.
TRANSPOSE = """\
template <class T> static inline __attribute__((always_inline)) void fx_transpose_block(
    const T* from, long stride, T* to, long width) {
  typedef T Row __attribute__((vector_size(8 * sizeof(T))));
  typedef Row Loose __attribute__((aligned(sizeof(T)), may_alias));
  Row a[8], b[8];
  for (int k = 0; k < 8; ++k) a[k] = *(const Loose*)(from + k * stride);
  for (int k = 0; k < 4; ++k) {
    b[2 * k] = __builtin_shufflevector(a[k], a[k + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    b[2 * k + 1] = __builtin_shufflevector(a[k], a[k + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  for (int k = 0; k < 4; ++k) {
    a[2 * k] = __builtin_shufflevector(b[k], b[k + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    a[2 * k + 1] = __builtin_shufflevector(b[k], b[k + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  for (int k = 0; k < 4; ++k) {
    b[2 * k] = __builtin_shufflevector(a[k], a[k + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    b[2 * k + 1] = __builtin_shufflevector(a[k], a[k + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  for (int k = 0; k < 8; ++k) *(Loose*)(to + k * width) = b[k];
}
template <class T> static __attribute__((noinline, noclone)) void fx_transpose(
    const T* from, long stride, long rows, long columns, T* to, long width) {
  long j = 0;
  for (; j + 8 <= columns; j += 8) {
    long l = 0;
    for (; l + 8 <= rows; l += 8) {
      if (l * sizeof(T) % 64 == 0)
        for (long k = j + 16; k < j + 24; ++k) FX_ASK(from + k * stride + l);
      fx_transpose_block(from + j * stride + l, stride, to + l * width + j, width);
    }
    for (; l < rows; ++l)
      for (long k = j; k < j + 8; ++k) to[l * width + k] = from[k * stride + l];
  }
  for (; j < columns; ++j)
    for (long l = 0; l < rows; ++l) to[l * width + j] = from[j * stride + l];
}
"""


class TilePrinter(KernelPrinter):
    """Writes a kernel without reductions in tiles of two axes: the row, and one that crosses it.

    Args:
        schedule: How the kernel is computed.
        name: Name of the function.
    """

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        kernel, traversal = schedule.kernel, schedule.traversal
        super().__init__(kernel, name, schedule.plan)
        assert isinstance(traversal, InCrossingTiles)
        self._axis, self._rows, self._columns = traversal.axis, traversal.rows, traversal.columns
        self._others = [a for a in range(len(kernel.outer_sizes)) if a != self._axis]
        self._down = ceil_div(kernel.sizes[self._axis], self._rows)
        self._along = ceil_div(kernel.sizes[-1], self._columns)
        self._streams = schedule.streamed

    def _tile_count(self) -> int:
        others = math.prod(self._kernel.sizes[a] for a in self._others)
        return others * self._down * self._along

    def _tile_index(self) -> None:
        for place, axis in enumerate(self._others):
            size = self._kernel.sizes[axis]
            inner = [self._kernel.sizes[a] for a in self._others[place + 1 :]]
            below = math.prod(inner) * self._down * self._along
            self._add(f"const long i{axis} = tile / {below} % {size};")
        self._add(f"const long i{self._axis} = tile / {self._along} % {self._down} * {self._rows};")
        self._add(f"const long begin = tile % {self._along} * {self._columns};")
        self._bound("width", self._kernel.sizes[self._axis], f"i{self._axis}", self._rows)
        self._bound("length", self._kernel.sizes[-1], "begin", self._columns)

    def _bound(self, name: str, size: int, start: str, most: int) -> None:
        rest = f"{size} - {start}"
        text = (
            f"{rest} < {most} ? {rest} : {most}" if is_runtime(size) or size % most else str(most)
        )
        self._add(f"const long {name} = {text};")

    def _declare(self) -> None:
        self._ask(f"for (long l = 0; l < {AHEAD}; ++l)", "l")
        for position, instruction in enumerate(self._kernel.body):
            if not self._is_turned(instruction):
                continue
            access = instruction.detail
            element = cpp_text.MEMORY[self._kernel.buffers[access.buffer].dtype]
            stride = access.strides[-1]
            start = f"{self._pointers[self._key(access)]} + {scaled('begin', stride)}"
            self._add(f"alignas(64) {element} x{position}[{self._rows * self._columns}];")
            self._add(
                f"fx_transpose((const {element}*)({start}), {stride}, width, length, "
                f"({element}*)x{position}, {self._columns});"
            )

    def _ask(self, when: str, row: str) -> None:
        """Ask for a row of what lies along rows, and of what is written, if there is any."""
        asked = []
        for access in dict.fromkeys(self._accesses()):
            step = access.strides[self._axis]
            if access.strides[-1] != 1 or not step or access.scales:
                continue
            buffer = self._kernel.buffers[access.buffer]
            where = f"{self._pointers[self._key(access)]} + {scaled(row, step)} + begin + j"
            unless = "if (!is_streamed) " if access in self._streams else ""
            asked.append(
                f"{unless}for (long j = 0; j < length; j += {64 // buffer.dtype.itemsize}) "
                + prefetch(where, buffer.is_output)
            )
        if asked:
            self._open(f"{when} {{")
            for line in asked:
                self._add(line)
            self._close()

    def _is_turned(self, instruction: Instruction) -> bool:
        return instruction.op == "load" and crossed_by(instruction) == self._axis

    def _row_scalars(self, values: Iterable[int], stores: Iterable[int]) -> None:
        """Write nothing: what does not vary along the row varies along the crossing axis."""

    def _sweep(self, one: RowSweep) -> None:
        self._open("for (long l = 0; l < width; ++l) {")
        self._ask(f"if (l + {AHEAD} < width)", f"(l + {AHEAD})")
        self._is_lone = True
        for value in one.scalars:
            if self._body(value).op != "const":
                self._define(value)
        self._is_lone = False
        pragma = f"#pragma omp simd{self._fault_clause(one.values)}"
        bounds = Bounds("begin", "begin + length", self._columns)
        self._vector_loops(bounds, [Loop(pragma, lambda: self._loop_body(one))])
        self._close()

    def _loop_body(self, one: RowSweep) -> None:
        for value in one.values:
            self._define(value)
        for position in one.stores:
            self._store(position)

    def _define(self, value: int) -> None:
        self._add(f"const {self._type(value)} v{value} = {self._value(value)};")
        self._check(value)

    def _value(self, position: int) -> str:
        instruction = self._body(position)
        if not self._is_turned(instruction):
            return super()._value(position)
        dtype = self._kernel.buffers[instruction.detail.buffer].dtype
        element = cpp_text.load_expression(f"{self._turned(position)} + j - begin]", dtype)
        return self._staged_read(position) or element

    def _turned(self, position: int) -> str:
        """Return the beginning of the text of an element that was turned over."""
        return f"x{position}[l * {self._columns}"

    def _first_read(self, position: int, begin: str) -> str:
        if self._is_turned(self._body(position)):
            return f"&{self._turned(position)} + {begin} - begin]"
        return super()._first_read(position, begin)

    def _step(self, access: Access) -> int:
        is_turned = any(i.detail is access and self._is_turned(i) for i in self._kernel.body)
        return 1 if is_turned else super()._step(access)

    def _ref(self, position: int) -> str:
        return self._value(position) if self._body(position).op == "const" else f"v{position}"

    def _lane_terms(self, access: Access) -> list[str]:
        stride = access.strides[self._axis]
        return [scaled("l", stride)] if stride else []
