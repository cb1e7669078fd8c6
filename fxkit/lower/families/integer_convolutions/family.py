"""Convolutions of 8-bit integers as a family of kernels."""

from __future__ import annotations

from typing import Any

import torch

from fxkit.lower.families.family import Family, Joined, Sample
from fxkit.lower.families.integer_convolutions.autotune import objection
from fxkit.lower.families.integer_convolutions.custom_op import NAME, operator
from fxkit.lower.families.integer_convolutions.nodes import integer_convolution
from fxkit.lower.families.integer_convolutions.printer import (
    IntegerConvolutionPrinter,
    IntegerDepthwisePrinter,
)
from fxkit.lower.families.product_node import calls_of


def _samples() -> dict[str, Sample]:
    made = torch.Generator().manual_seed(0)
    convolve = operator()

    def rand(*shape: int, low: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        drawn = torch.randint(low, low + 256, shape, dtype=dtype, generator=made)
        return drawn.contiguous(memory_format=torch.channels_last)

    def weight(*shape: int) -> torch.Tensor:
        return rand(*shape, low=-128, dtype=torch.int8)

    def layer(stride: Any = (1, 1), padding: Any = (0, 0), dilation: Any = (1, 1)) -> Any:
        return lambda x, w: convolve(x, w, 3, stride, padding, dilation, x.shape[1] // w.shape[1])

    def each_channel(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return convolve(x, w, 3, (2, 1), (1, 1), (1, 1), x.shape[1])

    images, windows = rand(2, 64, 13, 11), layer(padding=(1, 1))
    return {
        "windows of 3 × 3": (windows, (images, weight(33, 64, 3, 3))),
        "steps and dilation": (
            layer((2, 1), (1, 3), (1, 2)),
            (rand(1, 64, 15, 18), weight(70, 64, 3, 5)),
        ),
        "groups": (windows, (images, weight(48, 16, 3, 3))),
        "single pixels": (layer(), (images, weight(30, 64, 1, 1))),
        "single pixels apart": (layer((2, 2)), (images, weight(30, 64, 1, 1))),
        "each channel for itself": (each_channel, (images, weight(64, 1, 3, 3))),
        "followed": (
            lambda x, w, scale: torch.relu(windows(x, w).to(torch.float32) * scale),
            (images, weight(24, 64, 3, 3), torch.rand(24, 1, 1, generator=made)),
        ),
    }


FAMILY = Family(
    computes=calls_of(NAME),
    printers={
        "integer_convolution": IntegerConvolutionPrinter,
        "integer_depthwise": IntegerDepthwisePrinter,
    },
    kernels=Joined(integer_convolution, objection, objection),
    samples=_samples,
)
