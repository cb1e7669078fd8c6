"""Kernels that begin with a depthwise convolution; the text of the sums is `depthwise.h`."""

from __future__ import annotations

import functools
from pathlib import Path

from fxkit.lower.cpp.products import ProductPrinter
from fxkit.lower.loops.depthwise import Depthwise
from fxkit.lower.loops.loop_ir import Kernel


@functools.cache
def header() -> str:
    """Return the text of depthwise convolutions; it stands on that of products."""
    return Path(__file__).with_name("depthwise.h").read_text()


class DepthwisePrinter(ProductPrinter):
    """Writes a kernel that begins with a depthwise convolution, a block of pixels at a time."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        self._detail: Depthwise = kernel.body[0].detail

    def _multiply(self) -> None:
        one = self._detail
        batch, row, pixel = one.strides
        image = f"in{one.left} + batch * {batch} + from"
        height, width = one.image
        self._add(f"fx_image image = {{{image}, {height}, {width}, {row}, {pixel}}};")
        settings = (*one.window, *one.steps, *one.padding, *one.dilation)
        self._add(
            f"fx_depthwise<fx_window<{', '.join(map(str, settings))}>>(image, in{one.right} + from "
            f"* {one.depth}, {one.result[1]}, first, last, to - from, sums);"
        )
