"""Nodes that convolve 8-bit integers, as what a kernel can compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.families.convolutions.nodes import has_channels_innermost
from fxkit.lower.families.integer_convolutions.custom_op import NAME
from fxkit.lower.families.integer_convolutions.innermost_weight import innermost_strides
from fxkit.lower.families.product_node import ProductNode, arguments_of
from fxkit.lower.families.products.matrices import checked_operand, checked_type
from fxkit.lower.loop_ir.integer_convolution import IntegerConvolution
from fxkit.lower.loop_ir.loop_ir import Unfusable

# Elements that a window of each channel for itself may have; FX_MOST_ELEMENTS in the text.
MOST_ELEMENTS = 64


def integer_convolution(node: fx.Node, root: torch.nn.Module) -> ProductNode:
    """Return a node as a convolution that a kernel can compute.

    Raises:
        Unfusable: When no kernel can.
    """
    given = arguments_of(node, NAME)
    left, right = given["input"], given["weight"]
    known = type_of(left)
    is_unsigned = isinstance(known, TensorType) and known.dtype == torch.uint8
    kind = torch.uint8 if is_unsigned else torch.int8
    image = checked_operand(left, root, "left", kind)
    weight = checked_operand(right, root, "right", torch.int8)
    result = checked_type(type_of(node), "its result", torch.int32)
    if not has_channels_innermost(image) or not has_channels_innermost(result):
        raise Unfusable("its images do not have their channels innermost")
    detail = convolution_of(image, weight, result, given)
    if detail.channels is not None and not has_dense_windows(weight):
        raise Unfusable("elements of its weight do not lie with all their channels")
    return ProductNode(node, detail, (left, right), is_convolution=True, dtypes=(kind, torch.int8))


def has_dense_windows(weight: TensorType) -> bool:
    """Tell whether windows follow each other in memory, each element with all its channels."""
    wanted = innermost_strides(weight.shape)
    return weight.stride is not None and all(
        size == 1 or stride == step
        for size, stride, step in zip(weight.shape, weight.stride, wanted, strict=True)
    )


def convolution_of(
    image: TensorType, weight: TensorType, result: TensorType, arguments: Mapping[str, Any]
) -> IntegerConvolution:
    """Return what is summed for images, a weight and a result.

    Args:
        image: int8 or uint8[B, C, H, W], its channels innermost.
        weight: int8[N, C / groups, h, w].
        result: int32[B, N, H', W'], its channels innermost.
        arguments: Those of the operator that are not tensors.

    Raises:
        Unfusable: When no kernel sums it.
    """
    count, channels, *sizes = image.shape
    out, each, *window = weight.shape
    steps, padding, dilation = (
        tuple(arguments[name]) for name in ("stride", "padding", "dilation")
    )
    batch, _, row, pixel = image.stride or (0,) * 4
    has_tiles, zero = matrix_unit.multiplies_bytes(), arguments["zero"]
    groups = arguments["groups"]
    is_depthwise = groups == channels == out and groups > 1
    if is_depthwise and (math.prod(window) > MOST_ELEMENTS or not _is_in_order(weight)):
        raise Unfusable("its windows are large, or do not lie in order")
    made = IntegerConvolution(
        0, 1, count, None if is_depthwise else each, out, (sizes[0], sizes[1]),
        (result.shape[2], result.shape[3]), (batch, row, pixel), (window[0], window[1]), steps,
        padding, dilation, (1, each), zero=zero, has_tiles=has_tiles,
        groups=1 if is_depthwise else groups,
    )  # fmt: skip
    return _along_rows(made) if made.image[1] == made.window[1] == 1 else made


def _along_rows(one: IntegerConvolution) -> IntegerConvolution:
    """Return a convolution of single columns as one of single rows, whose windows lie dense."""
    if one.padding[1]:
        return one
    batch, row, _ = one.strides
    height = one.image[0]
    return replace(
        one,
        image=(1, height),
        result=(1, one.result[0]),
        strides=(batch, height * row, row),
        window=(1, one.window[0]),
        steps=(1, one.steps[0]),
        padding=(0, one.padding[0]),
        dilation=(1, one.dilation[0]),
    )


def _is_in_order(weight: TensorType) -> bool:
    """Tell whether the windows of a weight of single channels lie one after the other."""
    _, _, height, width = weight.shape
    wanted = (height * width, None, width, 1)
    return weight.stride is not None and all(
        size == 1 or stride == step
        for size, stride, step in zip(weight.shape, weight.stride, wanted, strict=True)
    )
