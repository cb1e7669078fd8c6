"""Autotuning of convolutions of integers: kernel against oneDNN's in float32; see `times`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from fxkit.lower.autotuning import times
from fxkit.lower.autotuning.times import MIN_TERMS
from fxkit.lower.families.convolutions.autotune import MAX_PIXELS
from fxkit.lower.families.integer_convolutions.innermost_weight import with_channels_innermost
from fxkit.lower.families.integer_convolutions.printer import (
    ROOM,
    IntegerDepthwisePrinter,
    most_rows,
)
from fxkit.lower.families.integer_products.printer import COLUMNS
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.printer import BLOCKS, block_rows, boolean
from fxkit.lower.loop_ir.integer_convolution import IntegerConvolution


def objection(found: ProductNode) -> None:
    """Return None: torch has nothing that convolves integers."""


def reason_to_stay_float(one: IntegerConvolution) -> str | None:
    """Return why a layer is as fast with numbers of float32, or None where integers are faster."""
    if one.terms < MIN_TERMS:
        return None
    part = _part_of(one)
    text = f"bytes beside dequantized {part} {part.steps} {part.padding} {part.dilation}"
    text = f"{text} {part.has_tiles}"
    measure = functools.partial(_measured, part)
    return times.slower(f"convolves {part}", text, measure, IntegerDepthwisePrinter.texts())


def _part_of(one: IntegerConvolution) -> IntegerConvolution:
    """Return a convolution of one image, or a part of it, that is like another one."""
    height, width = one.result
    fewer = height - min(height, max(1, MAX_PIXELS // width))
    image = (one.image[0] - fewer * one.steps[0], one.image[1])
    pixel = one.channels or one.columns
    strides = (0, image[1] * pixel, pixel)
    return replace(
        one, count=1, image=image, result=(height - fewer, width), strides=strides, zero=3
    )


def _measured(one: IntegerConvolution) -> tuple[float, float]:
    """Time a convolution, and what runs else: float32 by what is dequantised, and passes over it.

    Either begins with integers, and leaves bytes, which a layer that is quantised goes on with.
    """
    channels = _channels(one)
    image = torch.ones(1, channels, *one.image, dtype=torch.uint8)
    weight = torch.ones(one.columns, one.channels or 1, *one.window, dtype=torch.int8)
    settings = (one.steps, one.padding, one.dilation, one.groups if one.channels else channels)

    def library() -> None:
        operands = image.to(torch.float32), weight.to(torch.float32)
        F.conv2d(*operands, None, *settings).relu_().to(torch.uint8)

    return times.fastest(_kernel(one, weight), library)


def _channels(one: IntegerConvolution) -> int:
    """Return how many channels the images have."""
    return one.columns if one.channels is None else one.channels * one.groups


def _kernel(one: IntegerConvolution, weight: torch.Tensor) -> Callable[[], None]:
    """Return a call of the kernel that convolves."""
    threads = torch.get_num_threads()
    image = torch.ones(*one.image, _channels(one), dtype=torch.uint8)
    panels = one.groups * -(-one.columns // one.groups // COLUMNS)
    result = torch.empty(one.rows, panels * COLUMNS, dtype=torch.uint8)
    tensors = (image, weight if one.channels is None else with_channels_innermost(weight), result)
    lengths = [*one.image, *one.strides[1:], one.channels or 1, *one.window, *one.steps]
    lengths += [*one.padding, *one.dilation, one.result[1], one.rows, one.columns, one.groups]
    height = min(block_rows(one, threads), most_rows(one))
    numbers = (ctypes.c_long * 18)(*lengths, height)
    convolve = _DEPTHWISE if one.channels is None else _CONVOLVE
    trial = _TRIAL.replace("CONVOLVE", convolve).replace("HAS_TILES", boolean(one.has_tiles))
    function = times.trial_function("\n".join([*IntegerDepthwisePrinter.texts(), trial]))
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long]
    pointers = [tensor.data_ptr() for tensor in tensors]

    def kernel() -> None:
        function(*pointers, ctypes.addressof(numbers), threads)

    # The tensors live as long as what has their addresses.
    kernel.tensors = tensors  # type: ignore[attr-defined]
    return kernel


_TRIAL = f"""
extern "C" void fx_trial(const unsigned char* image, const unsigned char* weight,
                         unsigned char* out, const long* n, long threads) {{
  const fx_windows_of<unsigned char> g = {{image, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7],
                                           n[8], n[9], n[10], n[11], n[12], n[13]}};
  const long rows = n[14], groups = n[16], columns = n[15] / groups, height = n[17];
  const long depth = n[4] * n[5] * n[6];
  const long own = (columns + {COLUMNS - 1}) / {COLUMNS}, panels = own * groups;
  const long blocks = (rows + height - 1) / height;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {{
    alignas(64) unsigned char windows[{ROOM}];
    long held = -1;
#pragma omp for schedule(static)
    for (long tile = 0; tile < panels * blocks; ++tile) {{
      const long from = tile % own * {COLUMNS}, first = tile / panels * height;
      const long group = tile % panels / own;
      const long wide = columns - from < {COLUMNS} ? columns - from : {COLUMNS};
      const long last = rows - first < height ? rows : first + height;
      alignas(64) int sums[{BLOCKS[0] * COLUMNS}];
      CONVOLVE
      held = tile / own;
      for (long r = first; r < last; ++r)
        for (long j = 0; j < wide; ++j)
          out[(r * panels + tile % panels) * {COLUMNS} + j] = sums[(r - first) * {COLUMNS} + j];
    }}
  }}
}}
"""

_CONVOLVE = f"""
      fx_windows_of<unsigned char> part = g;
      part.first += group * n[4];
      const signed char* factors = (const signed char*)weight + (group * columns + from) * depth;
      fx_integer_convolution<HAS_TILES>(
          part, factors, wide, first, last, 3, windows, {ROOM}, held == tile / own, sums);
"""
_DEPTHWISE = """
      fx_windows_of<unsigned char> part = g;
      part.first += group + from;
      const signed char* const factors = (const signed char*)weight + from * depth;
      fx_integer_depthwise(part, factors, first, last, wide, 3, sums);
"""
