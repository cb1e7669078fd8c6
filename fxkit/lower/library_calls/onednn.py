"""Private calls of torch that lay a weight out for oneDNN."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxkit.lower.library_calls.torch_calls import has_calls

# Names of the operators → how many arguments they take in the versions that are known.
_CALLS = {
    "_convolution_pointwise.default": 10,
    "_convolution_pointwise_.binary": 13,
    "_reorder_convolution_weight.default": 6,
}


@dataclass(frozen=True)
class Settings:
    """How a convolution goes over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def is_available() -> bool:
    """Tell whether torch has been built with what lays out weights, and it is not turned off."""
    return _has_calls() and bool(torch.backends.mkldnn.enabled)


@functools.cache
def _has_calls() -> bool:
    return torch.backends.mkldnn.is_available() and has_calls(torch.ops.mkldnn, _CALLS)


def lay_out(weight: Tensor, settings: Settings, shape: Sequence[int]) -> Tensor:
    """Return a weight as oneDNN wants it for images of a shape; opaque to torch.

    Args:
        weight: float[out, C / groups, h, w]
        settings: Those of the convolution.
        shape: Of the images: [N, C, H, W].
    """
    return torch.ops.mkldnn._reorder_convolution_weight.default(
        weight.contiguous(memory_format=torch.channels_last),
        settings.padding, settings.stride, settings.dilation, settings.groups, shape,
    )  # fmt: skip


def convolve(image: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """Convolve an image, its channels innermost, with a weight from `lay_out`."""
    return torch.ops.mkldnn._convolution_pointwise.default(
        image, weight, bias, settings.padding, settings.stride, settings.dilation,
        settings.groups, "none", [], "",
    )  # fmt: skip


def add_convolved(total: Tensor, image: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Add a convolution to what is in `total`, and return that."""
    return torch.ops.mkldnn._convolution_pointwise_.binary(
        total, image, weight, None, settings.padding, settings.stride, settings.dilation,
        settings.groups, "add", 1.0, None, [], None,
    )  # fmt: skip
