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
        weight = f"in{one.right} + from * {one.depth}"
        if one.channels is None:
            lengths = [*one.image, *one.strides[1:]]
            settings = [*one.window, *one.steps, *one.padding, *one.dilation]
            self._add(f"fx_image image = {{{self._image()} + from, {_list(lengths)}}};")
            self._add(
                f"fx_depthwise<fx_window<{_list(settings)}>>(image, {weight}, {one.result[1]}, "
                "first, last, to - from, sums);"
            )
        else:
            self._add(f"const fx_geometry geometry = {self._geometry(self._image())};")
            self._convolve(weight)

    def _image(self) -> str:
        one = self._detail
        return f"in{one.left} + batch * {one.strides[0]}"

    def _geometry(self, image: str) -> str:
        """Return the text of an `fx_geometry`."""
        one = self._detail
        numbers = [*one.image, *one.strides[1:], one.channels or 1, *one.window, *one.steps]
        numbers += [*one.padding, *one.dilation, one.result[1], *one.weight_strides]
        return f"{{{image}, {_list(numbers)}}}"

    def _convolve(self, weight: str) -> None:
        self._add(f"fx_convolution(geometry, {weight}, first, last, to - from, sums);")


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
