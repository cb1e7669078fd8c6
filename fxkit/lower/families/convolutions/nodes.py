"""Packed convolutions that a kernel computes.

One of single pixels multiplies matrices: each pixel's channels are a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.families.product_node import Epilogue, ProductNode
from fxkit.lower.families.products.matrices import checked_operand, checked_type
from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.convolution import Convolution
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.loop_ir.product import Batch, Product

# Elements that a window may have. Depthwise, each window has a text of its own, where loops over
# it are written out; else a panel of weights has to hold one or two channels.
_MAX_DEPTHWISE = 49
_MAX_WINDOW = 144

# Height and width that a window over all channels may have: `convolution.h` has a bit for each of
# its rows, and of its columns.
_MAX_SIDE = 32


def is_packed_convolution(node: fx.Node) -> bool:
    """Tell whether a node calls `fxkit::convolution`."""
    call = resolve(node)
    return call is not None and call.name == "fxkit.convolution"


def has_kernel(shape: Sequence[int], groups: int) -> bool:
    """Tell whether kernels can convolve with a weight, of images with their channels innermost.

    Args:
        shape: Of the weight: [out, channels / groups, h, w].
        groups: Number of groups.
    """
    out, channels, *window = shape
    if groups != 1 and (groups != out or channels != 1):
        return False
    if groups != 1:
        return math.prod(window) <= _MAX_DEPTHWISE
    return math.prod(window) <= _MAX_WINDOW and max(window) <= _MAX_SIDE


def convolution_product(node: fx.Node, root: torch.nn.Module) -> ProductNode:
    """Return a packed convolution as a product, or one of each channel for itself.

    Raises:
        Unfusable: When no kernel computes it.
    """
    call = resolve(node)
    if call is None:
        raise Unfusable("it is no known operator")
    arguments = call.arguments
    image = checked_operand(arguments["input"], root, "left")
    weight = checked_operand(arguments["weight"], root, "right")
    result = checked_type(type_of(node), "its result")
    if not has_channels_innermost(image) or not has_channels_innermost(result):
        raise Unfusable("its images do not have their channels innermost")
    product = _product(image, weight, result, arguments)
    names = ("bias", "mean", "variance", "scale", "shift")
    given = {name: arguments[name] for name in names if arguments[name] is not None}
    strides = []
    for name, operand in given.items():
        known = checked_operand(operand, root, name)
        if known.shape != (product.columns,):
            raise Unfusable(f"its {name} is no row")
        strides.append((known.stride or (1,))[0])
    return ProductNode(
        node,
        product,
        (arguments["input"], arguments["weight"], *given.values()),
        tuple(strides),
        _normalising(tuple(given), float(arguments["eps"])),
        is_convolution=True,
    )


def _product(
    image: TensorType, weight: TensorType, result: TensorType, arguments: Mapping[str, Any]
) -> Product | Convolution:
    count, channels, *sizes = image.shape
    window = tuple(weight.shape[2:])
    steps, padding, dilation = (
        tuple(arguments[name]) for name in ("stride", "padding", "dilation")
    )
    batch_stride, _, row_stride, pixel_stride = image.stride or (0,) * 4
    out, groups = weight.shape[0], arguments["groups"]
    if window == steps == (1, 1) and padding == (0, 0) and groups == 1:
        return _product_of_pixels(count, batch_stride, sizes[0] * sizes[1], channels, out)
    is_depthwise = groups == channels == out
    if groups != 1 and not is_depthwise:
        raise Unfusable("it convolves groups of channels, as the library does")
    if not has_kernel(weight.shape, groups):
        raise Unfusable("its window is large, and the library computes it")
    is_innermost = not is_depthwise and (weight.stride or (0, 0))[1] == 1
    weight_strides = (1, channels) if is_innermost else (math.prod(window), 1)
    return Convolution(
        0, 1, count, None if is_depthwise else channels, out, (sizes[0], sizes[1]),
        tuple(result.shape[2:]), (batch_stride, row_stride, pixel_stride), window, steps, padding,
        dilation, weight_strides,
    )  # fmt: skip


def _product_of_pixels(count: int, stride: int, pixels: int, channels: int, out: int) -> Product:
    """Return a convolution of single pixels as a product of matrices."""
    strides = ((channels, 1), (1, channels))
    if count == 1 or stride == pixels * channels:
        return Product(0, 1, (), count * pixels, out, channels, *strides)
    return Product(0, 1, (Batch(count, stride, 0),), pixels, out, channels, *strides)


def has_channels_innermost(known: TensorType) -> bool:
    """Tell whether pixels follow each other in memory, row by row, each with all its channels.

    Strides of dimensions of size one are of no account.
    """
    if len(known.shape) != 4 or known.stride is None:
        return False
    count, channels, height, width = known.shape
    expected = (None, 1, width * channels, channels)
    return all(
        size == 1 or stride == wanted
        for size, stride, wanted in list(zip(known.shape, known.stride, expected, strict=True))[1:]
    ) and (count == 1 or known.stride[0] >= channels * height * width)


def _normalising(names: Sequence[str], eps: float) -> Epilogue:
    """Return what follows a sum: a bias, and a batch norm as eager computes it."""

    def epilogue(builder: Builder, total: Ref, columns: Sequence[Ref]) -> Ref:
        given = dict(zip(names, columns, strict=True))
        if "bias" in given:
            total = total + given["bias"]
        if "mean" not in given:
            return total
        factor = 1.0 / builder.scalar("sqrt", given["variance"] + eps)
        factor = factor * given["scale"] if "scale" in given else factor
        offset = given["mean"] * factor
        offset = given["shift"] - offset if "shift" in given else -offset
        return total * factor + offset

    return epilogue
