"""Autotuning of linear layers: packed weight against unpacked in torch's library; see `times`."""

from __future__ import annotations

import functools

import torch

from fxkit.errors import BuildError
from fxkit.lower.autotuning import times
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.autotune import OUTSIDE_BYTES, push_out
from fxkit.lower.library_calls import packed_linear
from fxkit.lower.loop_ir.product import Product

# Fewer rows cost less than what is read of the weight to find whether it changed.
MIN_ROWS = 96

# So much faster it has to be, for memory that the copy takes.
_MARGIN = 1.05


def packing_pays(found: ProductNode, adds_bias: bool) -> bool:
    """Tell whether a product that the library computes is faster with its weight packed.

    Args:
        found: The product.
        adds_bias: Whether the library adds its bias, too.
    """
    product = found.product
    if found.is_convolution or not isinstance(product, Product) or product.rows < MIN_ROWS:
        return False
    if product.count != 1 or product.terms < times.MIN_TERMS or not packed_linear.is_available():
        return False
    sizes = f"{product.rows} {product.depth} {product.columns} {product.left_strides}"
    key = f"packed {sizes} {adds_bias}"
    try:
        packed, plain = times.kept_times(key, lambda: _measured(product, adds_bias))
    except BuildError:
        return False
    return packed * _MARGIN <= plain


def _measured(product: Product, adds_bias: bool) -> tuple[float, float]:
    """Time a layer, its weight packed and not; a large weight as it lies in memory."""
    left = times.strided((product.rows, product.depth), product.left_strides)
    weight = torch.ones(product.columns, product.depth, dtype=torch.float32)
    bias = torch.ones(product.columns, dtype=torch.float32) if adds_bias else None
    is_outside = weight.nbytes >= OUTSIDE_BYTES
    before = functools.partial(push_out, weight) if is_outside else bool
    return times.fastest(
        lambda: packed_linear.linear(left, weight, bias),
        lambda: torch.nn.functional.linear(left, weight, bias),
        before=before,
    )
