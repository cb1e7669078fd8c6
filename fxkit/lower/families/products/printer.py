"""Kernels that begin with a matrix product; its epilogue runs while a block lies in the cache.

The C++ of the product is `product.h`. A tile of such a kernel is a panel of columns of a block of
rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path

from fxkit.lower.codegen.cpp.kernel_printer import TEAM, WORKSHARE, WORKSHARE_IN_TEAM, scaled
from fxkit.lower.families.products.row_epilogue import RowEpiloguePrinter
from fxkit.lower.loop_ir.convolution import Convolution
from fxkit.lower.loop_ir.loop_ir import Access, Kernel
from fxkit.lower.loop_ir.product import Product
from fxkit.lower.loop_ir.runtime_parameters import RuntimeInt, ceil_div, is_runtime
from fxkit.lower.scheduling.row_sweeps import RowSweep

# Columns of a panel; FX_COLUMNS in the text.
COLUMNS = 48

# Columns of a panel where a few rows are multiplied, and each row of the right operand lies along
# memory: it is read at long stretches. At most FX_ACROSS in the text.
ACROSS = 1536
FEW_ROWS = 4

# Such products whose results are at most so many numbers, of at least so many terms, are summed in
# parts that threads share, FX_SHARES in the text: each thread then reads memory from end to end.
SHARES = 16
MOST_SHARED = 1 << 12
TERMS_SHARED = 1 << 17

# Rows of a block. More rows share the work of bringing a panel into the cache; fewer make more
# tiles for the threads.
BLOCKS = (384, 192, 96, 48)
TILES_PER_THREAD = 2

# Where blocks have so many rows, all threads get as many of them: panels differ in width.
SHARED_ROWS = 192

# How many rows ahead what follows a product asks for its operands and results.
AHEAD = 8

# Rows that are summed at once where vectors are longest; FX_TILE in the text.
TILE = 8


class ProductPrinter(RowEpiloguePrinter):
    """Writes a kernel that begins with a matrix product.

    What depends on the column alone is computed once a tile: `c3[48]` holds value 3.
    """

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        self._product = kernel.body[0].detail
        product = self._product
        self._width = self._panel_width()
        self._panels = ceil_div(product.columns, self._width)
        self._rows = block_rows(product, threads=2)  # the text chooses by the threads of a call
        self._is_divided = is_runtime(product.rows) or product.rows > BLOCKS[-1]
        if self._is_divided:
            self._rows = RuntimeInt(self._rows, "height")
        self._blocks = ceil_div(product.rows, self._rows)

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of matrix products."""
        return (Path(__file__).with_name("product.h").read_text(),)

    @property
    def _columns(self) -> int:
        return self._product.columns

    def _panel_width(self) -> int:
        return panel_width(self._product)

    def text(self) -> str:
        """Return the function's text."""
        self._open(f'extern "C" void {self._name}({self._parameters()}) {{')
        self._read_numbers()
        if self._is_divided:
            self._choose_height()
        self._workshare_tiles()
        self._open(f"for (long tile = 0; tile < {self._tile_count()}; ++tile) {{")
        self._tile_index()
        self._declare()
        self._multiply()
        self._epilogue()
        self._close()
        self._end_tiles()
        self._close()
        return self._taken()

    def _room_of_thread(self) -> list[str]:
        """Return what a thread declares once, for all of its tiles."""
        return []

    def _end_tiles(self) -> None:
        """Write what follows the last tile."""
        if self._room_of_thread():
            self._close()

    @property
    def _room(self) -> int:
        """How far rows of `sums` are apart."""
        return self._width

    def _tile_count(self) -> int:
        return self._product.count * self._blocks * self._panels

    def _workshare_tiles(self) -> None:
        """Let threads share the tiles, unless there is one or they are quickly done."""
        most = self._product.count * self._panels * ceil_div(self._product.rows, BLOCKS[-1])
        is_shared = bool(is_runtime(most) or (most > 1 and not self._is_small))
        room = self._room_of_thread()
        if is_shared:
            self._add(TEAM if room else WORKSHARE)
        if not room:
            return
        self._open("{")
        for line in room:
            self._add(line)
        if is_shared:
            self._add(WORKSHARE_IN_TEAM)

    def _tile_index(self) -> None:
        product = self._product
        self._add(f"const long from = {self._first_column()};")
        self._add(f"const long block = tile / {self._panels} % {self._blocks};")
        self._add(f"const long batch = tile / {self._panels * self._blocks};")
        self._bound("to", f"from + {self._width}", self._last_column())
        self._add(f"const long first = block * {self._rows};")
        self._bound("last", f"first + {self._rows}", product.rows)

    def _first_column(self) -> str:
        """The first column of a tile."""
        return f"tile % {self._panels} * {self._width}"

    def _last_column(self) -> int | str:
        """Where its columns end at the latest."""
        return self._product.columns

    def _bound(self, name: str, end: str, limit: int | str) -> None:
        self._add(f"const long {name} = {end} < {limit} ? {end} : {limit};")

    @property
    def _heights(self) -> tuple[int, ...]:
        """Rows that a block may have, most first."""
        return BLOCKS

    def _choose_height(self) -> None:
        """Choose the rows of a block by the threads; see `block_rows`."""
        rows = self._product.rows
        panels = self._panels * self._product.count
        text = f"{rows} > {BLOCKS[-1]} ? {BLOCKS[-1]} : {BLOCKS[1]}"
        for height in reversed(self._heights):
            tiles = panels * ceil_div(rows, height)
            text = f"{tiles} >= {TILES_PER_THREAD} * threads ? {height} : {text}"
        self._add(f"const long most = {text};")
        self._add(f"const long fewest = ({rows} + most - 1) / most;")
        self._add("const long shared = (fewest + threads - 1) / threads * threads;")
        self._add(f"const long count = {rows} >= shared * {SHARED_ROWS} ? shared : fewest;")
        self._add(f"const long even = ({rows} + count - 1) / count;")
        self._add(f"const long height = (even + {TILE - 1}) / {TILE} * {TILE};")

    def _declare(self) -> None:
        product = self._product
        if self._width != COLUMNS:
            size = sums_across(product)
        elif is_runtime(product.rows):
            size = BLOCKS[0] * COLUMNS
        else:
            size = min(BLOCKS[0], int(ceil_div(product.rows, TILE)) * TILE) * COLUMNS
        self._add(f"alignas(64) float sums[{size}];")

    def _declare_block(self, kind: str, columns: int) -> None:
        """Declare the sums of a block: up to 8 rows more than it has."""
        rows = self._product.rows
        if is_runtime(rows) or rows > BLOCKS[0]:
            rows = BLOCKS[0]
        self._add(f"alignas(64) {kind} sums[{int(ceil_div(rows, 8)) * 8 * columns}];")

    def _multiply(self) -> None:
        """Sum a block of the product."""
        product = self._product
        row, left_step = product.left_strides
        right_step, column = product.right_strides
        left, right = self._matrices_of_batch()
        left += [f"first * {row}"] if row else []
        right += [f"from * {column}"] if column else []
        if self._width != COLUMNS:
            where = f"{' + '.join(left)}, {row}, {left_step}, {' + '.join(right)}, {right_step}"
            self._add(rows_across(product, where, "to - from", str(product.depth)))
            return
        self._add(
            f"fx_product<{template_arguments(product)}>({' + '.join(left)}, {row}, {left_step}, "
            f"{' + '.join(right)}, {right_step}, {column}, last - first, to - from, "
            f"{product.depth}, sums);"
        )

    def _matrices_of_batch(self) -> tuple[list[str], list[str]]:
        """Return the terms of the addresses of the operands that are multiplied for a batch."""
        product = self._product
        left, right = [f"in{product.left}"], [f"in{product.right}"]
        for number, batch in enumerate(product.batch):
            below = math.prod(inner.size for inner in product.batch[number + 1 :])
            self._add(f"const long b{number} = batch / {below} % {batch.size};")
            left += [scaled(f"b{number}", batch.left)] if batch.left else []
            right += [scaled(f"b{number}", batch.right)] if batch.right else []
        return left, right

    def _epilogue(self) -> None:
        """Compute what follows the product, for the rows of a tile."""
        self._compute_columns()
        self._open("for (long row = first; row < last; ++row) {")
        self._add(f"const long number = batch * {self._product.rows} + row;")
        self._outer_index("number", self._kernel.outer_sizes)
        self._point_into_buffers(self._accesses())
        self._prefetch()
        self._row_epilogue()
        self._close()

    def _prefetch(self) -> None:
        """Ask for a later row of what lies in memory row by row: a panel's part of it is short."""
        rows, outer = self._product.rows, len(self._kernel.outer_sizes)
        for access in dict.fromkeys(self._accesses()):
            step = access.strides[outer - 1] if outer else 0
            is_dense = access.strides[-1] == 1 and step and not access.scales
            if not is_dense or (not is_runtime(rows) and rows <= AHEAD):
                continue
            buffer = self._kernel.buffers[access.buffer]
            size = buffer.dtype.itemsize
            where = f"{self._pointers[self._key(access)]} + {AHEAD * step} + from"
            for first in (*range(0, self._width, 64 // size), self._width - 1):
                self._add(f"__builtin_prefetch({where} + {first}, {int(buffer.is_output)});")

    def _value(self, position: int) -> str:
        if self._body(position).is_tensor_op:
            return self._value_at(f"sums[(row - first) * {self._room} + j - from]")
        return super()._value(position)

    def _ref(self, position: int) -> str:
        if self._body(position).op != "const":
            return f"v{position}"
        return f"fx_all({self._value(position)})" if self._at_once else self._value(position)

    def _sweep(self, one: RowSweep) -> None:
        """Write nothing: `_epilogue` does."""

    def _row_scalars(self, values: Iterable[int], stores: Iterable[int]) -> None:
        """Write nothing: what does not vary along the row is computed with the rest."""

    def _lane_terms(self, access: Access) -> list[str]:
        return []


def template_arguments(product: Product) -> str:
    """Return those of `fx_product`, by what is known of a product's sizes and strides."""
    is_row_major = product.left_strides[1] == 1
    last = product.columns % COLUMNS or COLUMNS
    fewest = "1" if is_runtime(product.columns) else f"fx_vectors({last})"
    return f"{boolean(is_row_major)}, {fewest}, {boolean(may_have_few(product.rows))}"


def may_have_few(rows: int) -> bool:
    """Tell whether rows may be so few that they are multiplied without a panel."""
    return is_runtime(rows) or rows <= FEW_ROWS


def boolean(value: bool) -> str:
    """Return a truth value as C++ writes it."""
    return "true" if value else "false"


def rows_across(product: Product, operands: str, columns: str, depth: str) -> str:
    """Return the call that multiplies a few rows by columns that lie across memory.

    Args:
        product: The product.
        operands: Addresses and strides of the operands, as text.
        columns: How many columns there are, as text.
        depth: The number of terms of each sum, as text.
    """
    if shares_depth(product):
        return f"fx_rows_shared<{product.rows}>({operands}, {columns}, {depth}, sums, threads);"
    width = panel_width(product)
    return f"fx_rows_across<{product.rows}>({operands}, {columns}, {depth}, sums, {width});"


def sums_across(product: Product) -> int:
    """Return how many sums that call has room for."""
    return product.rows * panel_width(product) * (SHARES if shares_depth(product) else 1)


def shares_depth(product: Product) -> bool:
    """Tell whether threads share the depth of a product; see `SHARES`."""
    if not is_across(product) or is_runtime(product.terms):
        return False
    return (
        product.count == 1
        and product.rows * product.columns <= MOST_SHARED
        and product.terms >= TERMS_SHARED
    )


def is_across(product: Product) -> bool:
    """Tell whether a few rows are multiplied by a matrix whose rows are read at long stretches."""
    if is_runtime(product.rows) or is_runtime(product.columns):
        return False
    is_turned = product.right_strides[1] != 1
    return product.rows <= FEW_ROWS and not is_turned and product.columns >= 4 * COLUMNS


def panel_width(product: Product | Convolution) -> int:
    """Return how many columns of a product a tile has."""
    if not isinstance(product, Product) or not is_across(product):
        return COLUMNS
    if shares_depth(product):
        return product.columns
    panels = 2 * ceil_div(product.columns, 2 * ACROSS)
    return ceil_div(ceil_div(product.columns, panels), 16) * 16


def block_rows(product: Product | Convolution, threads: int) -> int:
    """Return how many rows of a product a tile has: blocks are as high as each other."""
    panels = ceil_div(product.columns, COLUMNS) * product.count
    most = BLOCKS[-1] if product.rows > BLOCKS[-1] else BLOCKS[1]
    for rows in BLOCKS:
        if panels * ceil_div(product.rows, rows) >= TILES_PER_THREAD * threads:
            most = rows
            break
    fewest = ceil_div(product.rows, most)
    shared = ceil_div(fewest, threads) * threads
    count = shared if product.rows >= shared * SHARED_ROWS else fewest
    return ceil_div(ceil_div(product.rows, count), TILE) * TILE
