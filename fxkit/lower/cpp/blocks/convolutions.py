"""Kernels that begin with a convolution, a block of pixels at a time.

The text of the sums is `convolution.h` and, where each channel is convolved for itself,
`depthwise.h`.
"""

from __future__ import annotations

import functools
from pathlib import Path

from fxkit.lower.cpp.blocks.products import ProductPrinter
from fxkit.lower.loops.loop_ir import Kernel
from fxkit.lower.loops.products.convolution import Convolution


@functools.cache
def header(op: str) -> str:
    """Return the text of convolutions; it stands on that of products.

    Args:
        op: `convolution` or `depthwise`.
    """
    return Path(__file__).with_name(f"{op}.h").read_text()


class ConvolutionPrinter(ProductPrinter):
    """Writes a kernel that begins with a convolution."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        self._detail: Convolution = kernel.body[0].detail

    def _multiply(self) -> None:
        one = self._detail
        batch, row, pixel = one.strides
        image = f"in{one.left} + batch * {batch}"
        lengths = [*one.image, row, pixel]
        settings = [*one.window, *one.steps, *one.padding, *one.dilation]
        width = one.result[1]
        weight = f"in{one.right} + from * {one.depth}"
        if one.channels is None:
            self._add(f"fx_image image = {{{image} + from, {_list(lengths)}}};")
            self._add(
                f"fx_depthwise<fx_window<{_list(settings)}>>(image, {weight}, {width}, "
                "first, last, to - from, sums);"
            )
        else:
            numbers = [*lengths, one.channels, *settings, width]
            self._add(f"const fx_geometry geometry = {{{image}, {_list(numbers)}}};")
            self._add(f"fx_convolution(geometry, {weight}, first, last, to - from, sums);")


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
