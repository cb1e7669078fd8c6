"""Products of float32 split into three bfloat16 numbers each, for the matrix unit.

The C++ is `bf16x3_product.h`, on top of that of unsplit numbers.
"""

from __future__ import annotations

import functools
from pathlib import Path

from fxkit.lower.families.products.printer import ProductPrinter, boolean

# Columns of a panel; FX_PANEL in the text.
COLUMNS = 64


class Bf16x3ProductPrinter(ProductPrinter):
    """Writes a kernel that begins with a product of split numbers."""

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of such products, behind that of others."""
        return (*ProductPrinter.texts(), Path(__file__).with_name("bf16x3_product.h").read_text())

    def _panel_width(self) -> int:
        return COLUMNS

    def text(self) -> str:
        """Return the function's text."""
        product = self._product
        self._open(f'extern "C" void {self._name}({self._parameters()}) {{')
        self._read_numbers()
        self._open(f"for (long batch = 0; batch < {product.count}; ++batch) {{")
        left, right = map(" + ".join, self._matrices_of_batch())
        numbers = (product.rows, product.columns, product.depth)
        strides = (*product.left_strides, right, *product.right_strides)
        self._add(
            f"const fx_matrices matrices = {{{', '.join(map(str, (left, *strides, *numbers)))}}};"
        )
        self._open(
            "const auto epilogue = [&](long first, long last, long from, long to, "
            "const float* sums) {"
        )
        self._epilogue()
        self._close(";")
        is_row_major = boolean(product.left_strides[1] == 1)
        self._add(f"fx_bf16x3_product<{is_row_major}>(matrices, threads, epilogue);")
        self._close()
        self._close()
        return self._taken()
