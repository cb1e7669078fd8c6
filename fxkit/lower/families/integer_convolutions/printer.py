"""Kernels that begin with a convolution of 8-bit integers; the C++ is `integer_convolution.h`."""

from __future__ import annotations

import functools
from pathlib import Path

from fxkit.lower.families.integer_products.printer import COLUMNS, IntegerProductPrinter
from fxkit.lower.families.products.printer import BLOCKS, boolean
from fxkit.lower.loop_ir.integer_convolution import IntegerConvolution
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import ceil_div, is_runtime

# Bytes of the windows of a block, which the panels of a block share; a multiple of FX_TILE_ROWS
# rows of 64 bytes. Longer windows are gathered part by part, for each panel again.
ROOM = 1 << 19

# Rows of a tile, FX_TILE_ROWS in the text: a block has room for whole tiles.
TILE_ROWS = 16

# With so few terms, a sum is soon done, and passing it through a cache takes most of the time.
FEW_TERMS = 640


class IntegerConvolutionPrinter(IntegerProductPrinter):
    """Writes a kernel that begins with a convolution of integers.

    The windows of a block of pixels are gathered into rows, once for all panels that follow each
    other in a thread.
    """

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        self._detail: IntegerConvolution = kernel.body[0].detail
        self._own_panels = ceil_div(self._detail.columns // self._detail.groups, self._width)
        self._panels = self._own_panels * self._detail.groups

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of such convolutions, behind that of products."""
        own = Path(__file__).with_name("integer_convolution.h").read_text()
        return (*IntegerProductPrinter.texts(), own)

    @property
    def _heights(self) -> tuple[int, ...]:
        """Rows that a block may have."""
        return tuple(rows for rows in BLOCKS if rows <= most_rows(self._detail))

    def _room_of_thread(self) -> list[str]:
        """Declare room for the windows of a block, and the block that they are of."""
        size = self._room_for_windows()
        return [f"alignas(64) unsigned char windows[{size}];", "long held = -1;"]

    def _room_for_windows(self) -> int:
        """Return how many bytes the windows of a block need, at most `ROOM`."""
        one = self._detail
        if is_runtime(one.rows) or is_runtime(one.depth):
            return ROOM
        return min(ROOM, _tiles_of(min(one.rows, BLOCKS[0])) * (-(-one.depth // 64) * 64))

    def _first_column(self) -> str:
        if self._detail.groups == 1:
            return super()._first_column()
        own, each = self._own_panels, self._detail.columns // self._detail.groups
        return f"tile % {self._panels} / {own} * {each} + tile % {own} * {self._width}"

    def _last_column(self) -> int | str:
        if self._detail.groups == 1:
            return super()._last_column()
        each = self._detail.columns // self._detail.groups
        return f"(tile % {self._panels} / {self._own_panels} + 1) * {each}"

    def _declare(self) -> None:
        rows = self._detail.rows
        size = BLOCKS[0] if is_runtime(rows) or rows > BLOCKS[0] else _tiles_of(rows)
        self._add(f"alignas(64) int sums[{size * COLUMNS}];")

    def _multiply(self) -> None:
        one = self._detail
        begin = f"in{one.left} + batch * {one.strides[0]}"
        if one.groups > 1:
            begin += f" + tile % {self._panels} / {self._own_panels} * {one.channels}"
        self._describe_image(begin)
        self._add(
            f"fx_integer_convolution<{boolean(one.has_tiles)}>(image, in{one.right} + "
            f"from * {one.depth}, to - from, first, last, {one.zero}, windows, sizeof windows, "
            f"held == tile / {self._own_panels}, sums);"
        )
        self._add(f"held = tile / {self._own_panels};")

    def _describe_image(self, first: str) -> None:
        """Write what an image is, and how windows lie in it."""
        one = self._detail
        numbers = [*one.image, *one.strides[1:], one.channels or 1, *one.window, *one.steps]
        numbers += [*one.padding, *one.dilation, one.result[1]]
        kind = "signed" if self._kernel.buffers[one.left].dtype.is_signed else "unsigned"
        listed = ", ".join(map(str, numbers))
        self._add(f"const fx_windows_of<{kind} char> image = {{{first}, {listed}}};")


class IntegerDepthwisePrinter(IntegerConvolutionPrinter):
    """Writes a kernel that begins with a convolution of each channel of integers for itself."""

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of such convolutions, behind that of those over all channels."""
        own = Path(__file__).with_name("integer_depthwise.h").read_text()
        return (*IntegerConvolutionPrinter.texts(), own)

    def _room_of_thread(self) -> list[str]:
        return []

    def _multiply(self) -> None:
        one = self._detail
        self._describe_image(f"in{one.left} + batch * {one.strides[0]} + from")
        self._add(
            f"fx_integer_depthwise(image, in{one.right} + from * {one.depth}, first, last, "
            f"to - from, {one.zero}, sums);"
        )


def _tiles_of(rows: int) -> int:
    """Round a number of rows up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def most_rows(one: IntegerConvolution) -> int:
    """Return how many rows a block may have: of few terms so few that a cache holds their sums."""
    return BLOCKS[2] if one.depth <= FEW_TERMS else BLOCKS[0]
