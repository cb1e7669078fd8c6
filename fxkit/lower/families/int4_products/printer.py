"""Kernels that begin with a product by 4-bit integers; the C++ is in its texts."""

from __future__ import annotations

import functools
from pathlib import Path

from fxkit.lower.codegen.cpp.text import TYPES
from fxkit.lower.families.integer_products.printer import IntegerProductPrinter
from fxkit.lower.families.products.printer import BLOCKS, ProductPrinter, boolean
from fxkit.lower.loop_ir.int4_product import Int4Product
from fxkit.lower.loop_ir.runtime_parameters import is_runtime

# Columns of a panel, FX_GROUP_COLUMNS in the text.
COLUMNS = 64

_TEXTS = (
    "int4_groups.h",
    "few_integer_rows.h",
    "int4_product.h",
    "few_float_rows.h",
    "many_float_rows.h",
)


class Int4ProductPrinter(ProductPrinter):
    """Writes a kernel that begins with a product by 4-bit integers in groups."""

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of such products, behind that of products of bytes."""
        own = (Path(__file__).with_name(name).read_text() for name in _TEXTS)
        return (*IntegerProductPrinter.texts(), *own)

    def _panel_width(self) -> int:
        return COLUMNS

    def _declare(self) -> None:
        self._declare_block("float", COLUMNS)

    def _room_of_thread(self) -> list[str]:
        """Declare the rows of a block in order, which the panels of a block share."""
        product = self._product
        assert isinstance(product, Int4Product)
        return [f"fx_{'floats' if product.is_float else 'bytes'}_in_order in_order;"]

    def _multiply(self) -> None:
        """Sum a block of the product."""
        product = self._product
        assert isinstance(product, Int4Product)
        row, groups = product.left_strides[0], product.depth // product.group
        kind, points = "signed char", "nullptr"
        if product.zero_points is not None:
            kind = TYPES[self._kernel.buffers[product.zero_points].dtype]
            points = f"in{product.zero_points} + from * {groups}"
        self._add(
            f"const fx_groups<{kind}> weight = {{(const unsigned char*)in{product.right} + "
            f"from * {product.depth // 2}, in{product.scales} + from * {groups}, {points}, "
            f"{product.group}}};"
        )
        left = f"in{product.left} + first * {row}, {row}"
        rest = f"weight, last - first, to - from, {product.depth}, "
        rest += f"tile / {self._panels}, in_order, sums"
        rows = known_rows(product.rows)
        if product.is_float:
            self._add(f"fx_int4_product<{rows}>({left}, {rest});")
            return
        zeros = f"fx_zeros{{nullptr, 0, {product.zero}}}"
        if product.zeros is not None:
            step = product.zeros_stride
            zeros = f"fx_zeros{{in{product.zeros} + first * {step}, {step}, 0}}"
        tiles = boolean(product.has_tiles)
        self._add(f"fx_int4_product<{tiles}, {rows}>({left}, {zeros}, {rest});")


def known_rows(rows: int) -> int:
    """Return how many rows each call of a product has, 0 where that is not known.

    Blocks of more rows are computed in one way, whatever is left for the last: their text is short.
    """
    return 0 if is_runtime(rows) else min(rows, BLOCKS[-1])
