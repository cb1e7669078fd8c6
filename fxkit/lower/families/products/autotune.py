"""Autotuning of matrix products: kernel against torch's library; see `times`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from fxkit.lower.autotuning import times
from fxkit.lower.autotuning.times import MIN_TERMS, near, strided
from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.codegen.cpp.kernel_printer import WORKSHARE
from fxkit.lower.families.products import bf16x3_printer, printer
from fxkit.lower.loop_ir.product import Batch, Product

# Of larger products a part of this size is timed.
MAX_ROWS, MAX_COUNT = 768, 16

# Bytes of a matrix that few rows are multiplied by, from which on it is timed as it lies in memory:
# a model's other matrices have pushed it out of the caches since it was read last.
OUTSIDE_BYTES = 1 << 21

# With more rows, up to so many, a product waits for its matrix too, also for a smaller one. In a
# program of a few layers that may stay in a cache: there a kernel has to be about as fast.
OUTSIDE_ROWS, LEAST_OUTSIDE_BYTES, INSIDE_RATIO = 64, 1 << 19, 1.05


def objection(product: Product) -> str | None:
    """Return why torch's library is as fast for a product, or None where a kernel is faster.

    One of split numbers has to be faster than one of unsplit numbers, too.
    """
    if product.is_bf16x3 and not matrix_unit.is_available():
        return "this processor has no unit that multiplies matrices of bfloat16"
    if product.terms < MIN_TERMS:
        return "it is too small to be split" if product.is_bf16x3 else None
    threads = torch.get_num_threads()
    part = _part_of(product)
    measure = functools.partial(_measured, part, threads)
    texts = bf16x3_printer.Bf16x3ProductPrinter.texts()
    return times.slower(f"multiplies {product}", _key(part), measure, texts)


def objection_by_kind(product: Product) -> str | None:
    """Do as `objection` for one of many sizes: what was measured for sizes near by serves."""
    left, right = product.left_strides, product.right_strides
    return objection(
        replace(
            product,
            batch=tuple(Batch(near(b.size), near(b.left), near(b.right)) for b in product.batch),
            rows=near(product.rows),
            columns=near(product.columns),
            depth=near(product.depth),
            left_strides=(near(left[0]), near(left[1])),
            right_strides=(near(right[0]), near(right[1])),
        )
    )


def _part_of(product: Product) -> Product:
    """Return a product that is small enough to be timed, and like this one."""
    room, batch = MAX_COUNT, []
    for one in reversed(product.batch):
        size = min(one.size, max(room, 1))
        room //= size
        batch.append(replace(one, size=size))
    return replace(product, batch=tuple(reversed(batch)), rows=min(product.rows, MAX_ROWS))


def _key(product: Product) -> str:
    batch = [(b.size, b.left, b.right) for b in product.batch]
    split = "split " if product.is_bf16x3 else "outside " if _is_outside(product) else ""
    return f"{split}{product} {batch} {product.left_strides} {product.right_strides}"


def _measured(product: Product, threads: int) -> tuple[float, float]:
    """Time a product, with the dimensions of its batch taken as one."""
    count = product.count
    left, right = _matrices(product, count)
    kernel = _kernel(product, left, right, threads)

    def library() -> None:
        torch.matmul(left, right) if count > 1 else torch.mm(left[0], right[0])

    if product.is_bf16x3:
        whole = _kernel(replace(product, is_bf16x3=False), left, right, threads)
        return times.fastest(kernel, library, whole)
    if not _is_outside(product):
        return times.fastest(kernel, library)
    outside = times.fastest(kernel, library, before=functools.partial(push_out, right))
    if product.rows <= printer.FEW_ROWS:
        return outside
    inside = times.fastest(kernel, library)
    return outside if inside[0] <= INSIDE_RATIO * inside[1] else inside


def _is_outside(product: Product) -> bool:
    """Tell whether it is timed with a matrix that no cache holds."""
    if product.is_bf16x3 or product.rows > OUTSIDE_ROWS:
        return False
    least = OUTSIDE_BYTES if product.rows <= printer.FEW_ROWS else LEAST_OUTSIDE_BYTES
    count = product.batch[-1].size if product.batch and product.batch[-1].right else 1
    return count * product.depth * product.columns * torch.float32.itemsize >= least


def timed_beside(product: Product, library: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a kernel for a product, and of what is called in its place."""
    left, right = _matrices(product, product.count)
    kernel = _kernel(product, left, right, torch.get_num_threads())
    return times.fastest(kernel, library)


def _kernel(
    product: Product, left: torch.Tensor, right: torch.Tensor, threads: int
) -> Callable[[], None]:
    """Return a call of the kernel that multiplies matrices of a product's sizes."""
    result = torch.empty(product.count, product.rows, product.columns, dtype=torch.float32)
    height = printer.block_rows(product, threads)
    lengths = (product.count, product.rows, product.columns, product.depth)
    sizes = (ctypes.c_long * 6)(*lengths, height, printer.panel_width(product))
    strides = (ctypes.c_long * 6)(*left.stride()[:1], *right.stride()[:1], *left.stride()[1:],
                                  *right.stride()[1:])  # fmt: skip
    function = times.trial_function(_source(product))
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long]
    pointers = [t.data_ptr() for t in (left, right, result)]

    def kernel() -> None:
        function(*pointers, ctypes.addressof(sizes), ctypes.addressof(strides), threads)

    # The tensors live as long as what has their addresses.
    kernel.tensors = (left, right, result)  # type: ignore[attr-defined]
    return kernel


def _matrices(product: Product, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands of the product's strides, with their batch as one dimension."""
    batch = product.batch[-1] if product.batch else Batch(1, 0, 0)
    shapes = ((count, product.rows, product.depth), (count, product.depth, product.columns))
    strides = ((batch.left, *product.left_strides), (batch.right, *product.right_strides))
    return strided(shapes[0], strides[0]), strided(shapes[1], strides[1])


def push_out(matrix: torch.Tensor) -> None:
    """Push a matrix out of the caches, where the processor can be told to."""
    function = times.trial_function(_PUSHING_OUT)
    function.argtypes = [ctypes.c_void_p, ctypes.c_long]
    function(matrix.data_ptr(), matrix.untyped_storage().nbytes())


def _source(product: Product) -> str:
    """Return the text of a trial, with those ways to multiply that the product may take."""
    if product.is_bf16x3:
        is_row_major = printer.boolean(product.left_strides[1] == 1)
        trial = _SPLIT_TRIAL.replace("MULTIPLY", f"fx_bf16x3_product<{is_row_major}>")
        return "\n".join([*bf16x3_printer.Bf16x3ProductPrinter.texts(), trial])
    sums = max(printer.BLOCKS) * printer.COLUMNS
    if printer.is_across(product):
        operands = "left, strides[2], strides[3], right, strides[4]"
        multiply = printer.rows_across(product, operands, "wide", "depth")
        sums = printer.sums_across(product)
    else:
        multiply = (
            f"fx_product<{printer.template_arguments(product)}>(left, strides[2], strides[3], "
            "right, strides[4], strides[5], count, wide, depth, sums);"
        )
    shared = "" if printer.shares_depth(product) else WORKSHARE
    trial = _TRIAL
    for name, text in (("MULTIPLY", multiply), ("WORKSHARE", shared), ("SUMS", str(sums))):
        trial = trial.replace(name, text)
    return "\n".join([*printer.ProductPrinter.texts(), trial])


_TRIAL = f"""
extern "C" void fx_trial(
    const float* a, const float* b, float* c, const long* n, const long* strides, long threads) {{
  const long rows = n[1], columns = n[2], depth = n[3], height = n[4], width = n[5];
  const long panels = (columns + width - 1) / width;
  const long blocks = (rows + height - 1) / height, tiles = n[0] * panels * blocks;
WORKSHARE
  for (long tile = 0; tile < tiles; ++tile) {{
    const long from = tile % panels * width, batch = tile / (panels * blocks);
    const long first = tile / panels % blocks * height;
    const long wide = columns - from < width ? columns - from : width;
    const long count = rows - first < height ? rows - first : height;
    alignas(64) float sums[SUMS];
    const float* const left = a + batch * strides[0] + first * strides[2];
    const float* const right = b + batch * strides[1] + from * strides[5];
    MULTIPLY
    for (long r = 0; r < count; ++r) {{
      float* const to = c + (batch * rows + first + r) * columns + from;
      for (long j = 0; j < wide; j += 16)
        __builtin_prefetch(to + {printer.AHEAD} * columns + j, 1);
      for (long j = 0; j < wide; ++j) to[j] = sums[r * width + j];
    }}
  }}
}}
"""

_PUSHING_OUT = """
extern "C" void fx_trial(const char* from, long bytes) {
  for (long i = 0; i < bytes; i += 64) {
#if defined(__CLFLUSHOPT__)
    __builtin_ia32_clflushopt(from + i);
#elif defined(__SSE2__)
    __builtin_ia32_clflush(from + i);
#endif
  }
}
"""

_SPLIT_TRIAL = f"""
extern "C" void fx_trial(
    const float* a, const float* b, float* c, const long* n, const long* strides, long threads) {{
  const long rows = n[1], columns = n[2], depth = n[3];
  for (long batch = 0; batch < n[0]; ++batch) {{
    const fx_matrices matrices = {{
        a + batch * strides[0], strides[2], strides[3], b + batch * strides[1], strides[4],
        strides[5], rows, columns, depth}};
    const auto copy = [&](long first, long last, long from, long to, const float* sums) {{
      for (long r = first; r < last; ++r) {{
        float* const row = c + (batch * rows + r) * columns;
        for (long j = 0; j < {bf16x3_printer.COLUMNS}; j += 16)
          __builtin_prefetch(row + {printer.AHEAD} * columns + from + j, 1);
        for (long j = from; j < to; ++j)
          row[j] = sums[(r - first) * {bf16x3_printer.COLUMNS} + j - from];
      }}
    }};
    MULTIPLY(matrices, threads, copy);
  }}
}}
"""
