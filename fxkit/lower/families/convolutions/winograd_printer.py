"""Kernels that begin with a 3 × 3 convolution by Winograd's algorithm.

The C++ is `winograd.h`, on top of that of other convolutions. A tile of such a kernel is whole
pairs of rows of pixels, by a panel of columns.
"""

from __future__ import annotations

import functools
from pathlib import Path

from fxkit.lower.families.convolutions.printer import ConvolutionPrinter
from fxkit.lower.families.products.printer import COLUMNS, TILES_PER_THREAD
from fxkit.lower.loop_ir.convolution import MOST_ACROSS, Convolution
from fxkit.lower.loop_ir.runtime_parameters import ceil_div, is_runtime

# Pixels of a tile, where a pair of rows has no more.
MOST_PIXELS = 384


def panel_columns(one: Convolution) -> int:
    """Return how many columns a panel has: panels are as wide as each other, but for the last."""
    return ceil_div(ceil_div(one.columns, ceil_div(one.columns, COLUMNS)), 16) * 16


def tile_pixels(one: Convolution, threads: int) -> int:
    """Return how many pixels a tile has: fewer where threads would have none.

    They are whole pairs of rows, in all tiles as many.
    """
    pairs, most = ceil_div(one.result[0], 2), max(1, MOST_PIXELS // (2 * one.result[1]))
    panels = one.count * ceil_div(one.columns, panel_columns(one))
    while most > 1 and panels * ceil_div(pairs, most) < TILES_PER_THREAD * threads:
        most -= 1
    return ceil_div(pairs, ceil_div(pairs, most)) * 2 * one.result[1]


class WinogradPrinter(ConvolutionPrinter):
    """Writes a kernel that begins with a convolution in Winograd's way.

    A weight is turned once a call, for all tiles, in memory that is freed at its end.
    """

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of such convolutions, behind that of others."""
        return (*ConvolutionPrinter.texts(), Path(__file__).with_name("winograd.h").read_text())

    def _panel_width(self) -> int:
        return panel_columns(self._product)

    @property
    def _room(self) -> int:
        return COLUMNS

    def _choose_height(self) -> None:
        """Choose the pixels of a tile by the threads; see `tile_pixels`."""
        one = self._product
        pairs = ceil_div(one.result[0], 2)
        panels = one.count * self._panels
        across = one.result[1]
        self._add(f"long most = {across} > {MOST_PIXELS // 2} ? 1 : {MOST_PIXELS // 2} / {across};")
        self._add(
            f"while (most > 1 && {panels} * (({pairs} + most - 1) / most) < "
            f"{TILES_PER_THREAD} * threads) --most;"
        )
        self._add(f"const long count = ({pairs} + most - 1) / most;")
        self._add(f"const long height = ({pairs} + count - 1) / count * {2 * one.result[1]};")

    def _workshare_tiles(self) -> None:
        one = self._product
        self._add(f"const fx_geometry shape = {self._geometry(f'in{one.left}')};")
        numbers = f"{one.columns}, {self._width}, threads"
        self._add(f"float* const turned = fx_turned_weight(shape, in{one.right}, {numbers});")
        super()._workshare_tiles()

    def _declare(self) -> None:
        across = self._product.result[1]
        pixels = max(MOST_PIXELS, 2 * (MOST_ACROSS if is_runtime(across) else across))
        self._add(f"alignas(64) float sums[{pixels * COLUMNS}];")

    def _convolve(self, weight: str) -> None:
        one = self._product
        size = 16 * one.channels * COLUMNS
        panel = f"turned ? turned + from / {self._width} * {size} : turned"
        self._add(f"fx_winograd(geometry, {panel}, {weight}, first, last, to - from, sums);")

    def _end_tiles(self) -> None:
        self._add("__builtin_free(turned);")
