"""Column reductions on a GPU: a block handles tiles of neighbouring rows."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cuda.kernel_printer import Tile
from fxkit.lower.codegen.cuda.layout import ACROSS, Layout
from fxkit.lower.codegen.cuda.reducing import ReducingPrinter
from fxkit.lower.loop_ir.loop_ir import Kernel


class CudaColumnPrinter(ReducingPrinter):
    """Writes a kernel whose rows lie across memory: a thread's neighbours are of several rows."""

    def __init__(self, kernel: Kernel, name: str, layout: Layout) -> None:
        self._alone: set[int] = set()
        super().__init__(kernel, name, layout)

    @property
    def _scalar_lane(self) -> str:
        return "[l]" if self._width > 1 else ""

    @property
    def _tiles(self) -> int:
        """Tiles of neighbouring rows."""
        return -(-self._kernel.outer_sizes[-1] // (ACROSS * self._width))

    @property
    def _is_partial(self) -> bool:
        """Whether the last tile has threads without a row."""
        return self._kernel.outer_sizes[-1] % (ACROSS * self._width) != 0

    def _blocks(self) -> int:
        return math.prod(self._kernel.outer_sizes[:-1]) * self._tiles

    def _locate(self) -> None:
        last, width = len(self._kernel.outer_sizes) - 1, self._width
        index = self._index
        self._add(f"const int t = (int)threadIdx.x / {ACROSS};")
        self._add(f"const {index} others = ({index})blockIdx.x / {self._tiles};")
        self._outer_index("others", self._kernel.outer_sizes[:-1])
        across = f"(int)threadIdx.x % {ACROSS}"
        first = f"({index})blockIdx.x % {self._tiles} * {ACROSS * width}"
        self._add(f"const {index} i{last} = {first} + {across} * {width};")
        if self._is_partial:
            self._add(f"const {index} count = {self._kernel.outer_sizes[-1]} - i{last};")

    def _open_loop(self) -> None:
        at, begin, end = self._position, "t", str(self._length)
        if self.layout.splits > 1:
            share = self.layout.share
            self._add(f"const {self._index} begin = ({self._index})blockIdx.y * {share};")
            self._add(
                f"const {self._index} end = begin + {share} < {end} ? begin + {share} : {end};"
            )
            begin, end = "begin + t", "end"
        if self._is_partial:
            self._open("if (count > 0) {")
        self._add("#pragma unroll 4")
        self._open(f"for ({self._index} {at} = {begin}; {at} < {end}; {at} += {self._group}) {{")
        self._row_axes(at)

    def _accumulate(self, position: int) -> None:
        operand = self._ref(self._body(position).operands[0])
        name = f"a{position}{self._lane}"
        text = f"{self._folded(position)}::of({name}, ({self._sum_type(position)}){operand})"
        self._add(f"{name} = {text};")

    @property
    def _lane(self) -> str:
        return "[l]" if self._width > 1 else "[0]"

    def _row_scalars(self, values: Iterable[int]) -> None:
        computed = [value for value in values if self._body(value).op != "const"]
        lanes = f"[{self._width}]" if self._width > 1 else ""
        for value in computed:
            self._add(f"{self._type(value)} v{value}{lanes};")
        if not computed:
            return
        self._open_lanes()
        for value in computed:
            self._add(f"{self._ref(value)} = {self._of_row(value)};")
        self._close()

    def _of_row(self, value: int) -> str:
        """Return a row scalar of one of a thread's rows, if that is there."""
        op = self._body(value).op
        if op not in ("load", "check") or not self._is_partial or self._width > 1:
            return self._single(value)
        if op == "check":
            return f"count <= 0 || {self._single(value)}"
        return f"count > 0 ? {self._single(value)} : {cpp_text.literal(0, self._body(value).dtype)}"

    def _single(self, value: int) -> str:
        instruction = self._body(value)
        if instruction.op != "load":
            return self._value(value)
        self._alone.add(value)
        try:
            return f"({self._value(value)})"
        finally:
            self._alone.discard(value)

    def _is_whole_load(self, position: int) -> bool:
        return position not in self._alone and super()._is_whole_load(position)

    def _store_rows(self) -> None:
        stores = self._row_stores()
        if not stores:
            return
        there = " && count > 0" if self._is_partial else ""
        shared = " && blockIdx.y == 0" if self.layout.splits > 1 else ""
        self._open(f"if (t == 0{there}{shared}) {{")
        self._tile(Tile((), stores=stores))
        self._close()

    def _begin(self, position: int) -> None:
        self._add(f"{self._sum_type(position)} a{position}[{self._width}];")
        self._open_lanes()
        self._add(f"a{position}{self._lane} = {self._identity(position)};")
        self._close()

    def _fold_down(self, position: int) -> None:
        self._add(f"fx_fold_down<{self._group}, {self._folded(position)}>(a{position});")

    def _finish(self, position: int) -> None:
        self._fold_down(position)
        lanes = f"[{self._width}]" if self._width > 1 else ""
        self._add(f"{self._type(position)} v{position}{lanes};")
        self._open_lanes()
        self._add(f"{self._ref(position)} = ({self._type(position)})a{position}{self._lane};")
        self._close()

    def _leave(self, position: int) -> None:
        self._fold_down(position)
        there = " && count > 0" if self._is_partial else ""
        self._open(f"if (t == 0{there}) {{")
        self._open_lanes()
        condition = "if (l < count) " if self._has_count else ""
        part = self._part(position, "blockIdx.y")
        self._add(f"{condition}{part} = a{position}{self._lane};")
        self._close()
        self._close()

    def _fold_left(self, position: int) -> None:
        self._open_lanes()
        condition = "if (l < count) " if self._has_count else ""
        if self._is_partial and self._width == 1:
            condition = "if (count > 0) "
        name = f"a{position}{self._lane}"
        text = f"{self._folded(position)}::of({name}, {self._part(position, 's')})"
        self._add(f"{condition}{name} = {text};")
        self._close()

    def _row_number(self) -> str:
        last = len(self._kernel.outer_sizes) - 1
        lane = " + l" if self._width > 1 else ""
        return f"(others * {self._kernel.outer_sizes[-1]}L + i{last}{lane})"
