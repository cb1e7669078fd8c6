"""Convolutions of 8-bit integers as a family of kernels."""

from __future__ import annotations

from typing import Any

import torch

from fxkit.lower.families.family import Family, Joined, Sample
from fxkit.lower.families.integer_convolutions.autotune import objection
from fxkit.lower.families.integer_convolutions.nodes import (
    integer_convolution,
    is_integer_convolution,
)
from fxkit.lower.families.integer_convolutions.operator import operator
from fxkit.lower.families.integer_convolutions.printer import IntegerConvolutionPrinter


def _samples() -> dict[str, Sample]:
    made = torch.Generator().manual_seed(0)
    convolve = operator()

    def rand(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
        drawn = torch.randint(low, high, shape, dtype=dtype, generator=made)
        return drawn.contiguous(memory_format=torch.channels_last)

    def layer(
        zero: int, stride: Any = (1, 1), padding: Any = (0, 0), dilation: Any = (1, 1)
    ) -> Any:
        return lambda x, w: convolve(x, w, zero, stride, padding, dilation, 1)

    images = rand(2, 20, 13, 11, dtype=torch.uint8)
    return {
        "windows of 3 × 3": (layer(3, padding=(1, 1)), (images, rand(33, 20, 3, 3))),
        "steps and dilation": (
            layer(-7, (2, 1), (1, 3), (1, 2)),
            (rand(1, 7, 15, 18), rand(70, 7, 3, 5)),
        ),
        "single pixels": (layer(5), (images, rand(30, 20, 1, 1))),
        "single pixels apart": (layer(5, (2, 2)), (images, rand(30, 20, 1, 1))),
        "followed": (
            lambda x, w, scale: torch.relu(
                convolve(x, w, 3, (1, 1), (1, 1), (1, 1), 1).to(torch.float32) * scale
            ),
            (images, rand(24, 20, 3, 3), torch.rand(24, 1, 1, generator=made)),
        ),
    }


FAMILY = Family(
    computes=is_integer_convolution,
    printers={"integer_convolution": IntegerConvolutionPrinter},
    kernels=Joined(integer_convolution, objection, objection),
    samples=_samples,
)
