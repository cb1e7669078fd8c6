"""Whether a kernel computes a packed convolution faster than oneDNN; see `product_trial`."""

from __future__ import annotations

import torch

from fxkit.lower.convolutions import packed
from fxkit.lower.loops.depthwise import Depthwise
from fxkit.lower.loops.product import Product
from fxkit.lower.loops.product_node import ProductNode
from fxkit.lower.running.product_trial import MIN_TERMS, near, slower, timed_beside

# Of larger images so many pixels are timed.
MAX_PIXELS = 1 << 14


def convolution_objection(found: ProductNode) -> str | None:
    """Return why oneDNN is as fast for a convolution, or None where a kernel is faster.

    One of each channel for itself is bound by memory: a kernel that goes on with its result is
    always faster.
    """
    if isinstance(found.product, Depthwise) or found.product.terms < MIN_TERMS:
        return None
    product = found.product
    return _slower(product.rows, product.depth, product.columns)


def convolution_objection_by_kind(found: ProductNode) -> str | None:
    """Do as `convolution_objection` for one of many sizes: those near by serve."""
    if isinstance(found.product, Depthwise) or found.product.terms < MIN_TERMS:
        return None
    product = found.product
    return _slower(near(product.rows), product.depth, product.columns)


def _slower(pixels: int, channels: int, results: int) -> str | None:
    pixels = min(pixels, MAX_PIXELS)
    what = f"convolves {pixels} pixels, {channels} channels to {results},"
    return slower(what, what, lambda: _measured(pixels, channels, results))


def _measured(pixels: int, channels: int, results: int) -> tuple[float, float]:
    """Time a convolution with a batch norm, and what a pass over its result takes beside it."""
    image = torch.ones(1, channels, 1, pixels).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(results, channels, 1, 1)
    one, slot = torch.ones(results), packed.new_slot()

    def library() -> None:
        packed.convolution(
            image, weight, None, one, one, one, one, 1e-5, (1, 1), (0, 0), (1, 1), 1, slot
        ).relu_()

    product = Product(0, 1, (), pixels, results, channels, (channels, 1), (1, channels))
    return timed_beside(product, library)
