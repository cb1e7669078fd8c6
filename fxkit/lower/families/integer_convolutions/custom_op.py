"""The operator `fxkit::integer_convolution`, which lowering calls for convolutions of integers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxkit.analysis.type_inference.own_operators import define_operator
from fxkit.ir.types import TensorType
from fxkit.lower.loop_ir.convolution import result_size

NAME = "fxkit.integer_convolution"

_SCHEMA = (
    "integer_convolution(Tensor input, Tensor weight, int zero, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, SymInt groups) -> Tensor"
)


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    return define_operator(_SCHEMA, integer_convolution, _type)


def _type(
    input: TensorType,
    weight: TensorType,
    zero: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> TensorType:
    settings = (stride, padding, dilation)
    height, width = result_size(input.shape[2:], weight.shape[2:], *settings)
    channels = weight.shape[0]
    return replace(
        input,
        shape=(input.shape[0], channels, height, width),
        stride=(channels * height * width, 1, width * channels, channels),
        dtype=torch.int32,
        requires_grad=False,
    )


def integer_convolution(
    input: Tensor,
    weight: Tensor,
    zero: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve `input - zero`, exact in 32 bits.

    Args:
        input: int8[B, C, H, W] or uint8[B, C, H, W].
        weight: int8[N, C / groups, h, w].
        zero: The zero point of all images, which is what lies beyond them.
        stride: Two numbers, as all that follows.
        padding: Zero points on each side.
        dilation: Steps between the elements of the weight.
        groups: Number of groups.

    Returns:
        int32[B, N, H', W'], with its channels innermost.
    """
    numbers = input.double() - zero  # float64 holds such sums exactly
    sums = F.conv2d(numbers, weight.double(), None, stride, padding, dilation, groups)
    count, channels, height, width = sums.shape
    result = sums.to(torch.int32).permute(0, 2, 3, 1).contiguous()
    strides = (channels * height * width, 1, width * channels, channels)
    return result.as_strided((count, channels, height, width), strides)
