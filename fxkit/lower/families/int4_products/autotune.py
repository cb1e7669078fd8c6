"""Autotuning of products by 4-bit integers: kernel against torch's library; see `times`."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

import torch
import torch.nn.functional as F

from fxkit.lower.autotuning import times
from fxkit.lower.autotuning.times import MIN_TERMS, near
from fxkit.lower.families.int4_products.printer import COLUMNS, Int4ProductPrinter, known_rows
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.autotune import push_out
from fxkit.lower.families.products.printer import boolean
from fxkit.lower.loop_ir.int4_product import Int4Product

# Of larger products a part of this size is timed.
MAX_ROWS = 384
# Up to so many rows may be multiplied in a way of their own, on some processor.
FEW_ROWS = 12


def objection(found: ProductNode) -> str | None:
    """Return None: torch has no product of these, and would make floats of the weight first."""
    return None


def reason_to_stay_float(product: Int4Product, dtype: torch.dtype = torch.float32) -> str | None:
    """Return why a layer is as fast with floats, or None where integers of 4 bits are faster.

    With floats a layer makes numbers of its weight at each call, which is a pass over it.

    Args:
        product: What is summed.
        dtype: The floats that the layer takes.
    """
    if product.terms < MIN_TERMS:
        return None
    group, columns = product.group, near(product.columns)
    depth = max(1, near(product.depth) // group) * group
    alike = replace(
        product,
        rows=min(product.rows, MAX_ROWS),
        columns=columns,
        depth=depth,
        left_strides=(depth, 1),
        right_strides=(1, depth // 2),
        zero_points=None,
        zeros=None,
        zero=0,
    )
    measure = functools.partial(_measured, alike, dtype)
    key = f"groups {alike} {alike.has_tiles}{times.beside(dtype)}"
    return times.slower(f"multiplies {product}", key, measure, Int4ProductPrinter.texts())


def _measured(product: Int4Product, dtype: torch.dtype) -> tuple[float, float]:
    rows, depth, columns = product.rows, product.depth, product.columns
    numbers = torch.ones(rows, depth, dtype=dtype)
    left = numbers if product.is_float else numbers.to(torch.int8)
    packed = torch.ones(columns, depth // 2, dtype=torch.int8)
    scales = torch.ones(columns, depth // product.group)
    weight, result = torch.ones(columns, depth, dtype=torch.int8), torch.empty(rows, columns)
    rest = "w, rows, wide, depth, 0, in_order, sums)"
    count = known_rows(rows if rows <= FEW_ROWS else MAX_ROWS)  # which share the text of a trial
    if product.is_float:
        kind, call = "floats", f"fx_int4_product<{count}>(a, depth, {rest}"
    else:
        tiles, zeros = boolean(product.has_tiles), "fx_zeros{nullptr, 0, 3}"
        kind = "bytes"
        call = f"fx_int4_product<{tiles}, {count}>((const signed char*)a, depth, {zeros}, {rest}"
    source = _TRIAL.replace("CALL", call).replace("KIND", kind).replace("GROUP", str(product.group))
    function = times.trial_function("\n".join([*Int4ProductPrinter.texts(), source]))
    function.argtypes = [ctypes.c_void_p] * 5
    sizes = (ctypes.c_long * 4)(rows, depth, columns, torch.get_num_threads())
    pointers = [t.data_ptr() for t in (left, packed, scales, result)]

    def kernel() -> None:
        function(*pointers, ctypes.addressof(sizes))

    def library() -> None:
        F.linear(numbers, weight.to(dtype))

    def before() -> None:  # a model's other weights have pushed it out of the caches
        push_out(packed)
        push_out(weight)

    return times.fastest(kernel, library, before=before)


_TRIAL = f"""
extern "C" void fx_trial(const float* a, const unsigned char* b, const float* scales, float* c,
                         const long* n) {{
  const long rows = n[0], depth = n[1], columns = n[2];
#pragma omp parallel num_threads(n[3]) if (n[3] > 1)
  {{
  fx_KIND_in_order in_order;
#pragma omp for schedule(static) nowait
  for (long from = 0; from < columns; from += {COLUMNS}) {{
    alignas(64) float sums[{MAX_ROWS * COLUMNS}];
    const long wide = columns - from < {COLUMNS} ? columns - from : {COLUMNS};
    const long scale = from * (depth / GROUP);
    const fx_groups<signed char> w = {{b + from * depth / 2, scales + scale, nullptr, GROUP}};
    CALL;
    for (long r = 0; r < rows; ++r)
      for (long j = 0; j < wide; ++j) c[r * columns + from + j] = sums[r * {COLUMNS} + j];
  }}
  }}
}}
"""
