"""Kernels that begin with a matrix product of 8-bit integers; the C++ is `integer_product.h`."""

from __future__ import annotations

import functools
from pathlib import Path

from fxkit.lower.families.integer_products.narrow_results import NarrowResultsPrinter
from fxkit.lower.families.products.printer import boolean
from fxkit.lower.loop_ir.integer_product import IntegerProduct

# Columns of a panel, FX_PANEL_COLUMNS in the text.
COLUMNS = 64

_TEXTS = ("integer_terms.h", "turned_panel.h", "integer_tiles.h", "integer_product.h")


class IntegerProductPrinter(NarrowResultsPrinter):
    """Writes a kernel that begins with a product of integers."""

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of such products."""
        return tuple(Path(__file__).with_name(name).read_text() for name in _TEXTS)

    def _panel_width(self) -> int:
        return COLUMNS

    def _declare(self) -> None:
        self._declare_block("int", COLUMNS)

    def _multiply(self) -> None:
        """Sum a block of the product."""
        product = self._product
        assert isinstance(product, IntegerProduct)
        row, _ = product.left_strides
        term, column = product.right_strides
        zeros = f"{{nullptr, 0, {product.zero}}}"
        if product.zeros is not None:
            step = product.zeros_stride
            zeros = f"{{in{product.zeros} + first * {step}, {step}, 0}}"
        left, right = (" + ".join(terms) for terms in self._matrices_of_batch())
        self._add(
            f"fx_integer_product<{boolean(product.has_tiles)}>({left} + first * {row}, {row}, "
            f"{right} + from * {column}, {term}, {column}, last - first, to - from, "
            f"{product.depth}, {zeros}, sums);"
        )
