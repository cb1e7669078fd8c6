"""Autotuning of packed convolutions: kernel against oneDNN; see `times`."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from fxkit.errors import BuildError
from fxkit.lower.autotuning import times
from fxkit.lower.autotuning.times import MIN_TERMS, near
from fxkit.lower.families.convolutions import winograd_printer
from fxkit.lower.families.convolutions.nodes import has_kernel
from fxkit.lower.families.convolutions.printer import ConvolutionPrinter
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.autotune import timed_beside
from fxkit.lower.families.products.printer import BLOCKS, COLUMNS, block_rows
from fxkit.lower.library_calls import packed_convolution as packed
from fxkit.lower.library_calls.onednn import Settings
from fxkit.lower.loop_ir.convolution import MOST_ACROSS, Convolution, result_size
from fxkit.lower.loop_ir.product import Product

# Of larger results so many pixels are timed.
MAX_PIXELS = 1 << 12


def convolution_objection(found: ProductNode) -> str | None:
    """Return why oneDNN is as fast for a convolution, or None where a kernel is faster.

    One of each channel for itself is bound by memory: a kernel that goes on with its result is
    always faster.
    """
    return _objection(found.product)


def convolution_objection_by_kind(found: ProductNode) -> str | None:
    """Do as `convolution_objection` for one of many sizes: those near by serve."""
    one = found.product
    if isinstance(one, Product):
        return _objection(replace(one, rows=near(one.rows)))
    added = [near(size) - size for size in one.result]
    grown = [a * step for a, step in zip(added, one.steps, strict=True)]
    image = (one.image[0] + grown[0], one.image[1] + grown[1])
    return _objection(replace(one, image=image, result=(near(one.result[0]), near(one.result[1]))))


def _objection(one: Product | Convolution) -> str | None:
    if (isinstance(one, Convolution) and one.channels is None) or one.terms < MIN_TERMS:
        return None
    part = _convolution_of(one) if isinstance(one, Product) else _part_of(one)
    text = f"{part} {part.steps} {part.padding} {part.dilation} {part.weight_strides}"
    texts = winograd_printer.WinogradPrinter.texts()
    return times.slower(f"convolves {part}", text, lambda: _measured(part), texts)


def unpacked_is_faster(
    image: Sequence[int], weight: torch.Tensor, settings: Settings, *, has_norm: bool
) -> bool:
    """Tell whether eager convolves faster than both a kernel and oneDNN with a packed weight.

    That may be where oneDNN convolves a few channels at a time; see `packed_convolution`.

    Args:
        image: Shape of the images: [N, C, H, W].
        weight: float[out, C, h, w].
        settings: Those of the convolution, of one group.
        has_norm: Whether a batch norm follows, which a packed weight takes in.

    Returns:
        False also where the trial can't be built.
    """
    _, channels, height, width = image
    window, steps, padding, dilation = (
        (size[0], size[1])
        for size in (weight.shape[2:], settings.stride, settings.padding, settings.dilation)
    )
    is_innermost = weight.stride()[1] == 1 < channels
    one = Convolution(
        0, 1, 1, channels, len(weight), (height, width),
        result_size((height, width), window, steps, padding, dilation),
        (0, width * channels, channels),
        window, steps, padding, dilation, (1, channels) if is_innermost else (math.prod(window), 1),
    )  # fmt: skip
    one = _part_of(one)
    text = f"{one} {one.steps} {one.padding} {one.dilation} {one.weight_strides}"
    key = f"packed or not {text}{' with a norm' if has_norm else ''}"
    measure = functools.partial(_measured_beside_eager, one, has_norm)
    try:
        eager, ours = times.kept_times(key, measure, winograd_printer.WinogradPrinter.texts())
    except BuildError:
        return False
    return eager < ours


def _measured_beside_eager(one: Convolution, has_norm: bool) -> tuple[float, float]:
    """Time eager's convolution, and the faster one of oneDNN's, packed, and a kernel."""
    image, weight, library = _operands_and_library(one)
    plain, ones = image.contiguous(), torch.ones(one.columns)
    weight_of_eager = weight.contiguous()

    def eager() -> None:
        result = F.conv2d(plain, weight_of_eager, None, one.steps, one.padding, one.dilation)
        if has_norm:
            result = F.batch_norm(result, ones, ones, ones, ones)
        result.relu_()

    kernels = []
    if has_kernel(weight.shape, 1):
        kernels.append(_kernel(one, image, weight))
    return times.fastest(eager, library, *kernels)


def _convolution_of(product: Product) -> Convolution:
    """Return a convolution of single pixels that is like a product."""
    pixels, channels = min(product.rows, MAX_PIXELS), product.depth
    ones, noughts = (1, 1), (0, 0)
    return Convolution(
        0, 1, 1, channels, product.columns, (1, pixels), (1, pixels), (0, 0, channels), ones, ones,
        noughts, ones, ones,
    )  # fmt: skip


def _part_of(one: Convolution) -> Convolution:
    """Return a convolution of one image, or a part of it, that is like another one."""
    height, width = one.result
    fewer = height - min(height, max(1, MAX_PIXELS // width))
    image = (one.image[0] - fewer * one.steps[0], one.image[1])
    pixel = one.channels or 1
    strides = (0, image[1] * pixel, pixel)
    return replace(one, count=1, image=image, result=(height - fewer, width), strides=strides)


def _operands_and_library(
    one: Convolution,
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
    """Return an image and a weight, and a call of oneDNN with a norm and a pass over its result."""
    channels, results = one.channels or 1, one.columns
    made = functools.partial(torch.ones, dtype=torch.float32)
    image = made(1, channels, *one.image).contiguous(memory_format=torch.channels_last)
    weight = made(results, channels, *one.window)
    if one.weight_strides[0] == 1:
        weight = weight.contiguous(memory_format=torch.channels_last)
    ones, slot = made(results), packed.new_slot()

    def library() -> None:
        packed.convolution(
            image, weight, None, ones, ones, ones, ones, 1e-5, one.steps, one.padding,
            one.dilation, 1, slot,
        ).relu_()  # fmt: skip

    return image, weight, library


def _measured(one: Convolution) -> tuple[float, float]:
    """Time a convolution, and oneDNN's with a batch norm and a pass over its result."""
    image, weight, library = _operands_and_library(one)
    if one.window == one.steps == (1, 1) and one.padding == (0, 0):
        channels = one.channels or 1
        strides = ((channels, 1), (1, channels))
        product = Product(0, 1, (), one.rows, one.columns, channels, *strides)
        return timed_beside(product, library)
    kernel = _kernel(one, image, weight)
    if not one.is_winograd:
        return times.fastest(kernel, library)
    return times.fastest(kernel, library, _kernel(replace(one, is_winograd=False), image, weight))


def _kernel(one: Convolution, image: torch.Tensor, weight: torch.Tensor) -> Callable[[], None]:
    """Return a call of the kernel that convolves."""
    threads = torch.get_num_threads()
    result = torch.empty(one.rows, one.columns, dtype=torch.float32)
    lengths = [*one.image, *one.strides[1:], one.channels or 1, *one.window, *one.steps]
    lengths += [*one.padding, *one.dilation, one.result[1], *one.weight_strides]
    lengths += [one.rows, one.columns]
    height = (winograd_printer.tile_pixels if one.is_winograd else block_rows)(one, threads)
    width = winograd_printer.panel_columns(one) if one.is_winograd else COLUMNS
    numbers = (ctypes.c_long * 20)(*lengths, height, width)
    function = times.trial_function(_source(one.is_winograd))
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long]
    pointers = [image.data_ptr(), weight.data_ptr(), result.data_ptr()]

    def kernel() -> None:
        function(*pointers, ctypes.addressof(numbers), threads)

    # The tensors live as long as what has their addresses.
    kernel.tensors = (image, weight, result)  # type: ignore[attr-defined]
    return kernel


def _source(is_winograd: bool) -> str:
    printer = winograd_printer.WinogradPrinter if is_winograd else ConvolutionPrinter
    trial = _TRIAL
    for name, text in (_WINOGRAD if is_winograd else _PLAIN).items():
        trial = trial.replace(name, text)
    return "\n".join([*printer.texts(), trial])


_TRIAL = f"""
extern "C" void fx_trial(
    const float* image, const float* weight, float* out, const long* n, long threads) {{
  const fx_geometry g = {{image, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10],
                          n[11], n[12], n[13], n[14], n[15]}};
  const long rows = n[16], columns = n[17], height = n[18], width = n[19];
  const long panels = (columns + width - 1) / width;
  const long blocks = (rows + height - 1) / height;
  BEFORE
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long tile = 0; tile < panels * blocks; ++tile) {{
    const long from = tile % panels * width, first = tile / panels * height;
    const long wide = columns - from < width ? columns - from : width;
    const long last = rows - first < height ? rows : first + height;
    const float* const windows = weight + from * n[4] * n[5] * n[6];
    alignas(64) float sums[{max(BLOCKS[0], 2 * MOST_ACROSS) * COLUMNS}];
    CONVOLVE
    for (long r = first; r < last; ++r)
      for (long j = 0; j < wide; ++j)
        out[r * columns + from + j] = sums[(r - first) * {COLUMNS} + j];
  }}
  AFTER
}}
"""

_PLAIN = {
    "BEFORE": "",
    "CONVOLVE": "fx_convolution(g, windows, first, last, wide, sums);",
    "AFTER": "",
}
_WINOGRAD = {
    "BEFORE": "float* const turned = fx_turned_weight(g, weight, columns, width, threads);",
    "CONVOLVE": (
        f"const long panel = tile % panels * 16 * n[4] * {COLUMNS};"
        "fx_winograd(g, turned ? turned + panel : turned, windows, first, last, wide, sums);"
    ),
    "AFTER": "__builtin_free(turned);",
}
