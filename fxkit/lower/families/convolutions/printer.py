"""Kernels that begin with a convolution, a block of pixels at a time.

The C++ is `convolution.h` and, for depthwise convolutions, `depthwise.h`.
"""

from __future__ import annotations

import functools
from pathlib import Path

from fxkit.lower.families.products.printer import ProductPrinter
from fxkit.lower.loop_ir.convolution import Convolution
from fxkit.lower.loop_ir.loop_ir import Kernel


class ConvolutionPrinter(ProductPrinter):
    """Writes a kernel that begins with a convolution."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        self._detail: Convolution = kernel.body[0].detail

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of convolutions, behind that of products."""
        return (*ProductPrinter.texts(), Path(__file__).with_name("convolution.h").read_text())

    def _multiply(self) -> None:
        self._add(f"const fx_geometry geometry = {self._geometry(self._image())};")
        self._convolve(self._weight())

    def _weight(self) -> str:
        return f"in{self._detail.right} + from * {self._detail.depth}"

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


class DepthwisePrinter(ConvolutionPrinter):
    """Writes a kernel that begins with a convolution of each channel for itself."""

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of such convolutions, behind that of products."""
        return (*ProductPrinter.texts(), Path(__file__).with_name("depthwise.h").read_text())

    def _multiply(self) -> None:
        one = self._detail
        lengths = [*one.image, *one.strides[1:]]
        settings = [*one.window, *one.steps, *one.padding, *one.dilation]
        self._add(f"fx_image image = {{{self._image()} + from, {_list(lengths)}}};")
        self._add(
            f"fx_depthwise<fx_window<{_list(settings)}>>(image, {self._weight()}, {one.result[1]}, "
            "first, last, to - from, sums);"
        )


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
