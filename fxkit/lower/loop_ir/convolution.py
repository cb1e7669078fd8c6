"""A convolution of images as a value of the loop IR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from fxkit.lower.loop_ir.tensor_op import Numbers, TensorOp

# Of a convolution in Winograd's way: with fewer channels its products are too small, and a pair of
# longer rows of pixels takes more room than a tile has.
_FEWEST_CHANNELS, MOST_ACROSS = 16, 256


@dataclass(frozen=True, slots=True)
class Convolution(TensorOp):
    """The detail of an instruction `convolution` or, channel by channel, of a `depthwise` one.

    A kernel has at most one. Its row is the channels of one pixel of the result; all outer axes
    together number the pixels, image by image, row by row. An image's channels lie next to each
    other; the weight is float[columns, channels, *window], without gaps,
    with its channels innermost or its windows.

    Attributes:
        left: Position of the images' buffer.
        right: Position of the weight's buffer.
        count: Number of images.
        channels: Number of channels of an image; None where each is convolved for itself.
        columns: Number of channels of the result.
        image: Height and width of an image.
        result: Height and width of a result.
        strides: Strides of the images, in elements: from image to image, from row to row, and
            from pixel to pixel.
        window: Height and width of the window.
        steps: How far the window moves from one result to the next, down and across.
        padding: Noughts around an image, above and to the left.
        dilation: How far the elements of the window are apart, down and across.
        weight_strides: Strides of the weight's windows, in elements: from channel to channel, and
            from element to element. The windows of one channel of the result lie in one place.
        is_winograd: Whether it is computed in Winograd's way; see `may_be_winograd`.
    """

    left: int
    right: int
    count: int
    channels: int | None
    columns: int
    image: tuple[int, int]
    result: tuple[int, int]
    strides: tuple[int, int, int]
    window: tuple[int, int]
    steps: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    weight_strides: tuple[int, int]
    is_winograd: bool = False

    @property
    def op(self) -> str:
        """The instruction that it is the detail of."""
        return "depthwise" if self.channels is None else "convolution"

    @property
    def way(self) -> str:
        """The instruction's name, or Winograd's: what prints it."""
        return "winograd" if self.is_winograd else self.op

    @property
    def may_be_winograd(self) -> bool:
        """Tell whether Winograd's way serves: a window of 3 × 3 at each pixel, over channels."""
        return (
            self.channels is not None
            and self.window == (3, 3)
            and self.steps == self.dilation == (1, 1)
            and min(self.channels, self.columns) >= _FEWEST_CHANNELS
            and 1 < self.result[1] <= MOST_ACROSS
        )

    @property
    def rows(self) -> int:
        """Pixels of one result."""
        return self.result[0] * self.result[1]

    @property
    def depth(self) -> int:
        """Number of terms of each sum."""
        return math.prod(self.window) * (1 if self.channels is None else self.channels)

    @property
    def terms(self) -> int:
        """Number of multiplications."""
        return self.count * self.rows * self.columns * self.depth

    @property
    def cost(self) -> int:
        """Estimate of the operations for one element."""
        return 1 + self.depth // 8

    def renumbered(self, numbers: Numbers) -> Convolution:
        """Return it with sizes and strides replaced; the window and how it moves stay."""
        return replace(
            self,
            count=numbers.one(self.count),
            channels=None if self.channels is None else numbers.one(self.channels),
            columns=numbers.one(self.columns),
            image=cast("tuple[int, int]", numbers.all_of(self.image)),
            result=cast("tuple[int, int]", numbers.all_of(self.result)),
            strides=cast("tuple[int, int, int]", numbers.all_of(self.strides)),
        )

    def evaluated(self, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        """Convolve by torch."""
        channels = self.columns if self.channels is None else self.channels
        batch, row, pixel = self.strides
        image = memory[self.left].as_strided(
            (self.count, channels, *self.image), (batch, 1, row, pixel)
        )
        channel, element = self.weight_strides
        weight = memory[self.right].as_strided(
            (self.columns, self.channels or 1, *self.window),
            (self.depth, channel, self.window[1] * element, element),
        )
        groups = channels if self.channels is None else 1
        settings = (self.steps, self.padding, self.dilation, groups)
        return torch.nn.functional.conv2d(image, weight, None, *settings).permute(0, 2, 3, 1)

    def __str__(self) -> str:
        channels = self.columns if self.channels is None else self.channels
        image = [self.count, channels, *self.image]
        way = " in Winograd's way" if self.is_winograd else ""
        return f"{image} by {list(self.window)} to {self.columns} channels{way}"


def result_size(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Return height and width of what a convolution makes of images."""
    height, width = (
        (size + 2 * pad - step * (side - 1) - 1) // by + 1
        for size, side, by, pad, step in zip(image, window, stride, padding, dilation, strict=True)
    )
    return height, width
