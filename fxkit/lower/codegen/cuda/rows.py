"""Contiguous rows on a GPU: part of a warp, a block, or several blocks a row."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from fxkit.lower.codegen.cuda.kernel_printer import Tile
from fxkit.lower.codegen.cuda.reducing import ReducingPrinter


class CudaRowPrinter(ReducingPrinter):
    """Writes a kernel whose rows lie along memory: a thread's neighbours are of one row."""

    @property
    def _scalar_lane(self) -> str:
        return ""

    @property
    def _in_block(self) -> int:
        """Rows of a block."""
        return self.layout.threads // self._group

    @property
    def _is_partial(self) -> bool:
        """Whether the last block has threads without a row."""
        return self._rows % self._in_block != 0

    def _blocks(self) -> int:
        return -(-self._rows // self._in_block)

    def _locate(self) -> None:
        if self._in_block == 1:
            self._add("const int t = (int)threadIdx.x;")
            self._add(f"const {self._index} row = ({self._index})blockIdx.x;")
        else:
            self._add(f"const int t = (int)threadIdx.x % {self._group};")
            number = f"({self._index})blockIdx.x * {self._in_block}"
            number += f" + (int)threadIdx.x / {self._group}"
            if self._is_partial:
                self._add(f"const {self._index} asked = {number};")
                self._add(f"const bool is_inside = asked < {self._rows};")
                number = f"is_inside ? asked : {self._rows - 1}"
            self._add(f"const {self._index} row = {number};")
        self._outer_index("row", self._kernel.outer_sizes)

    def _open_loop(self) -> None:
        at, width = self._position, self._width
        scale = f" * {width}" if width > 1 else ""
        if self._is_walked:
            begin, end = f"t{scale}", str(self._length)
            if self.layout.splits > 1:
                share = self.layout.share
                self._add(f"const {self._index} begin = ({self._index})blockIdx.y * {share};")
                self._add(
                    f"const {self._index} end = begin + {share} < {end} ? begin + {share} : {end};"
                )
                begin, end = f"begin + {begin}", "end"
            self._add("#pragma unroll 4")
            loop = f"{self._index} {at} = {begin}; {at} < {end}; {at} += {self._group * width}"
            self._open(f"for ({loop}) {{")
        else:
            items = self.layout.items
            self._add("#pragma unroll")
            self._open(f"for (int n = 0; n < {items}; ++n) {{")
            self._add(f"const {self._index} {at} = (n * {self._group} + t){scale};")
            if items * self._group * width != self._length or self._has_count:
                self._open(f"if ({at} < {self._length}) {{")
        self._row_axes(at)
        if self._has_count:
            self._add(f"const {self._index} count = {self._length} - {at};")

    def _tile(self, tile: Tile) -> None:
        chunks = [p for p in tile.reductions if self._has_chunk(p)]
        for p in chunks:
            self._add(f"float c{p} = 0.0f;")
        if self._is_partial and tile.stores:
            inner = Tile(tile.values, tile.known, tile.keeps, (), tile.reductions)
            self._guarded_tile(tile, inner)
        else:
            super()._tile(tile)
        for p in chunks:
            self._add(f"a{p} += c{p};")

    def _guarded_tile(self, tile: Tile, inner: Tile) -> None:
        """Print a tile whose threads may have no row of their own: those store nothing."""
        if not tile.reductions and not tile.keeps:
            self._open("if (is_inside) {")
            super()._tile(tile)
            self._close()
            return
        super()._tile(inner)
        self._open("if (is_inside) {")
        super()._tile(Tile(tile.values, tile.known, (), tile.stores))
        self._close()

    def _has_chunk(self, position: int) -> bool:
        """Whether neighbours are added in float32, before the sum goes on in float64."""
        return self._is_walked and self._width > 1 and self._is_float_sum(position)

    def _accumulate(self, position: int) -> None:
        name = f"{'c' if self._has_chunk(position) else 'a'}{position}"
        operand = self._ref(self._body(position).operands[0])
        condition = "if (l < count) " if self._has_count else ""
        type_ = "float" if self._has_chunk(position) else self._sum_type(position)
        text = f"{self._folded(position)}::of({name}, ({type_}){operand})"
        self._add(f"{condition}{name} = {text};")

    def _row_scalars(self, values: Iterable[int]) -> None:
        for value in values:
            if self._body(value).op != "const":
                self._scalar(value, self._at_row(value))

    def _scalar(self, value: int, text: str) -> None:
        """Define a value that is the same all along the row."""
        self._add(f"const {self._type(value)} v{value} = {text};")
        if value in self._divisors:
            self._add(f"const FxDivisor d{value} = fx_divisor(v{value});")

    @functools.cached_property
    def _divisors(self) -> set[int]:
        """Row scalars that the elements of the row are divided by."""
        quotients = [
            i.operands
            for i, is_wide in zip(self._kernel.body, self._wide, strict=True)
            if is_wide and i.op == "div" and i.dtype == torch.float32
        ]
        by = {divisor for dividend, divisor in quotients if self._wide[dividend]}
        return {p for p in by if not self._wide[p] and self._body(p).op != "const"}

    def _divisor(self, position: int) -> str | None:
        return f"d{position}" if position in self._divisors else super()._divisor(position)

    def _at_row(self, value: int) -> str:
        """Return a value that is the same all along the row."""
        width, self._width = self._width, 1
        try:
            return self._value(value)
        finally:
            self._width = width

    def _store_rows(self) -> None:
        stores = self._row_stores()
        if not stores:
            return
        inside = " && is_inside" if self._is_partial else ""
        shared = " && blockIdx.y == 0" if self.layout.splits > 1 else ""
        self._open(f"if (t == 0{inside}{shared}) {{")
        width, self._width = self._width, 1
        for position in stores:
            self._store(position, False)
        self._width = width
        self._close()

    def _begin(self, position: int) -> None:
        self._add(f"{self._sum_type(position)} a{position} = {self._identity(position)};")

    def _finish(self, position: int) -> None:
        fold = f"fx_fold<{self._group}, {self._folded(position)}>(a{position})"
        self._scalar(position, f"({self._type(position)}){fold}")

    def _leave(self, position: int) -> None:
        fold = f"fx_fold<{self._group}, {self._folded(position)}>(a{position})"
        self._add(f"a{position} = {fold};")
        self._add(f"if (t == 0) {self._part(position, 'blockIdx.y')} = a{position};")

    def _fold_left(self, position: int) -> None:
        part = self._part(position, "s")
        self._add(f"a{position} = {self._folded(position)}::of(a{position}, {part});")

    def _row_number(self) -> str:
        return "row"
