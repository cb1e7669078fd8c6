"""Autotuning of integer products: kernel against torch's library; see `times`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from fxkit.lower.autotuning import times
from fxkit.lower.autotuning.times import MIN_TERMS, near, strided
from fxkit.lower.families.integer_products.custom_op import integer_product
from fxkit.lower.families.integer_products.printer import COLUMNS, IntegerProductPrinter
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.printer import boolean
from fxkit.lower.loop_ir.integer_product import IntegerProduct
from fxkit.lower.loop_ir.product import Batch

# Of larger products a part of this size is timed.
MAX_ROWS, MAX_COUNT = 384, 16


def objection(found: ProductNode) -> str | None:
    """Return why torch's library is as fast for a product, or None where a kernel is faster.

    Either has to make numbers of float32 of the sums, as what follows a product begins with.
    """
    product = found.product
    assert isinstance(product, IntegerProduct)
    if product.terms < MIN_TERMS:
        return None
    part = _part_of(product)
    left, right = operands(part)

    def library() -> None:
        integer_product(left, right, zero=zero).to(torch.float32)

    zero = int(part.zeros is not None or part.zero)
    measure = functools.partial(times_beside, part, left, right, library)
    key = f"integers {part} {part.right_strides} {part.has_tiles}"
    return times.slower(f"multiplies {product}", key, measure, IntegerProductPrinter.texts())


def objection_by_kind(found: ProductNode) -> str | None:
    """Do as `objection` for one of many sizes: what was measured for sizes near by serves."""
    product = found.product
    assert isinstance(product, IntegerProduct)
    depth, columns = near(product.depth), near(product.columns)
    term = product.right_strides[0]
    alike = replace(
        product,
        batch=tuple(replace(one, size=near(one.size)) for one in product.batch),
        rows=near(product.rows),
        columns=columns,
        depth=depth,
        left_strides=(depth, 1),
        right_strides=(1, depth) if term == 1 else (columns, 1),
    )
    return objection(replace(found, product=alike))


def reason_to_stay_float(
    product: IntegerProduct, *, pairs_fit: bool = True, dtype: torch.dtype = torch.float32
) -> str | None:
    """Return why a layer is as fast with floats, or None where integers are faster.

    Args:
        product: What is summed.
        pairs_fit: Whether pairs of products fit into 16 bits when they are added, see
            `pairs_fit_into_16_bits`: others take longer without VNNI.
        dtype: The floats that the layer takes.
    """
    if product.terms < MIN_TERMS:
        return None
    part = _part_of(product)
    left, right = operands(part)
    if not pairs_fit:
        right.fill_(127)
    numbers, factors = left.to(dtype), right.to(dtype)

    def library() -> None:
        torch.matmul(numbers, factors)

    measure = functools.partial(times_beside, part, left, right, library)
    kind = "" if pairs_fit else " by weights that need more than 16 bits"
    key = f"integers or float {part} {part.has_tiles}{kind}{times.beside(dtype)}"
    return times.slower(f"multiplies {product}", key, measure, IntegerProductPrinter.texts())


def pairs_fit_into_16_bits(weight: torch.Tensor) -> bool:
    """Tell whether sums of two products of neighbours by unsigned bytes fit into 16 bits.

    Args:
        weight: int8[N, K], each row summed.
    """
    even = weight.shape[1] // 2 * 2
    if not weight[:, :even].numel():
        return True
    integers = weight[:, :even].to(torch.int16)
    positive, negative = integers.clamp(min=0), integers.clamp(max=0)
    largest = (positive[:, ::2] + positive[:, 1::2]).max()
    least = (negative[:, ::2] + negative[:, 1::2]).min()
    return bool(largest <= 128 and least >= -128)


def operands(product: IntegerProduct) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands of a product's sizes, and of its strides within a matrix."""
    rows, depth, columns = product.rows, product.depth, product.columns
    left, right = (rows, depth), (depth, columns)
    strides = [(depth, 1), product.right_strides]
    if product.batch:
        spans = [_span(left, strides[0]), _span(right, strides[1])]
        strides = [(span, *inner) for span, inner in zip(spans, strides, strict=True)]
        left, right = (product.count, *left), (product.count, *right)
    return strided(left, strides[0], torch.int8), strided(right, strides[1], torch.int8)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _part_of(product: IntegerProduct) -> IntegerProduct:
    """Return a product that is small enough to be timed, with the axes of its batch as one."""
    part = replace(product, rows=min(product.rows, MAX_ROWS))
    if not part.batch:
        return part
    return replace(part, batch=(Batch(min(product.count, MAX_COUNT), 1, 1),))


def times_beside(
    product: IntegerProduct,
    left: torch.Tensor,
    right: torch.Tensor,
    library: Callable[[], None],
) -> tuple[float, float]:
    """Return the seconds of a kernel for a product, and of what is called in its place."""
    trial = _TRIAL.replace("HAS_TILES", boolean(product.has_tiles))
    function = times.trial_function("\n".join([*IntegerProductPrinter.texts(), trial]))
    function.argtypes = [ctypes.c_void_p] * 4
    result = torch.empty(product.count, product.rows, product.columns)
    between = (left.stride(0), right.stride(0)) if product.batch else (0, 0)
    numbers = (product.rows, product.depth, product.columns, *product.right_strides,
               torch.get_num_threads(), product.count, *between)  # fmt: skip
    sizes = (ctypes.c_long * len(numbers))(*numbers)
    pointers = [t.data_ptr() for t in (left, right, result)]

    def kernel() -> None:
        function(*pointers, ctypes.addressof(sizes))

    return times.fastest(kernel, library)


_TRIAL = f"""
extern "C" void fx_trial(const signed char* a, const signed char* b, float* c, const long* n) {{
  const long rows = n[0], depth = n[1], columns = n[2], term = n[3], step = n[4];
#pragma omp parallel for num_threads(n[5]) if (n[5] > 1) schedule(static) collapse(2)
  for (long i = 0; i < n[6]; ++i)
    for (long from = 0; from < columns; from += {COLUMNS}) {{
      alignas(64) int sums[{MAX_ROWS * COLUMNS}];
      const long wide = columns - from < {COLUMNS} ? columns - from : {COLUMNS};
      fx_integer_product<HAS_TILES>(a + i * n[7], depth, b + i * n[8] + from * step, term, step,
                                    rows, wide, depth, fx_zeros{{nullptr, 0, 3}}, sums);
      float* const to = c + i * rows * columns + from;
      for (long r = 0; r < rows; ++r)
        for (long j = 0; j < wide; ++j) to[r * columns + j] = sums[r * {COLUMNS} + j];
    }}
}}
"""
