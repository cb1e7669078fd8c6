"""Kernels that begin with floats by 8-bit integers; the C++ is `int8_weight_product.h`."""

from __future__ import annotations

import functools
from pathlib import Path

from fxkit.lower.families.products.printer import ProductPrinter

# Columns of a panel.
COLUMNS = 64

# More rows use each number of the weight often enough for it to be worth a float in memory.
FEW_ROWS = 4


class Int8WeightProductPrinter(ProductPrinter):
    """Writes a kernel that begins with a product by 8-bit integers."""

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of such products."""
        return (Path(__file__).with_name("int8_weight_product.h").read_text(),)

    def _panel_width(self) -> int:
        return COLUMNS

    def _declare(self) -> None:
        self._add(f"alignas(64) float sums[{FEW_ROWS * COLUMNS}];")

    def _multiply(self) -> None:
        """Sum a block of the product."""
        product = self._product
        row, (_, column) = product.left_strides[0], product.right_strides
        self._add(
            f"fx_int8_weight_product(in{product.left} + first * {row}, {row}, in{product.right} + "
            f"from * {column}, {column}, last - first, to - from, {product.depth}, sums);"
        )
