"""Convolutions of images as a family of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxkit.lower.families.convolutions.autotune import (
    convolution_objection,
    convolution_objection_by_kind,
)
from fxkit.lower.families.convolutions.nodes import convolution_product, is_packed_convolution
from fxkit.lower.families.convolutions.printer import ConvolutionPrinter, DepthwisePrinter
from fxkit.lower.families.convolutions.winograd_printer import WinogradPrinter
from fxkit.lower.families.family import Family, Joined, Sample
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.loop_ir.convolution import Convolution


def _samples() -> dict[str, Sample]:
    made = torch.Generator().manual_seed(0)

    def layer(*sizes: Any, **settings: Any) -> nn.Module:
        module = nn.Conv2d(*sizes, **settings).requires_grad_(False)
        for parameter in module.parameters():
            parameter.normal_(generator=made)
        return module

    def image(*shape: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(*shape, generator=made),)

    return {
        "windows of 3 × 3": (layer(20, 33, 3, padding=1), image(2, 20, 13, 11)),
        "steps and dilation": (
            layer(7, 10, (3, 5), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
            image(1, 7, 15, 18),
        ),
        "single channels": (layer(24, 24, 3, padding=1, groups=24), image(2, 24, 9, 9)),
        "single pixels": (layer(40, 30, 1), image(2, 40, 6, 7)),
        "followed": (nn.Sequential(layer(8, 24, 3), nn.ReLU()), image(3, 8, 10, 12)),
    }


def _others(found: ProductNode, allows_bf16x3: bool) -> list[ProductNode]:
    """Return a convolution in Winograd's way, where that serves."""
    one = found.product
    if not isinstance(one, Convolution) or not one.may_be_winograd:
        return []
    return [replace(found, product=replace(one, is_winograd=True))]


FAMILY = Family(
    computes=is_packed_convolution,
    printers={
        "convolution": ConvolutionPrinter,
        "depthwise": DepthwisePrinter,
        "winograd": WinogradPrinter,
    },
    kernels=Joined(
        convolution_product, convolution_objection, convolution_objection_by_kind, _others
    ),
    samples=_samples,
)
