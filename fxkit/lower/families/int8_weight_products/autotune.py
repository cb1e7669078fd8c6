"""Autotuning of products by 8-bit integers: kernel against torch's library; see `times`."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

import torch
import torch.nn.functional as F

from fxkit.lower.autotuning import times
from fxkit.lower.autotuning.times import MIN_TERMS, near, strided
from fxkit.lower.families.int8_weight_products.printer import COLUMNS, Int8WeightProductPrinter
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.autotune import push_out
from fxkit.lower.loop_ir.int8_weight_product import Int8WeightProduct


def objection(found: ProductNode) -> str | None:
    """Return None: torch has no product of these, and would make floats of the weight first."""
    return None


def reason_to_stay_float(product: Int8WeightProduct) -> str | None:
    """Return why a layer is as fast with a weight of float32, or None where integers are faster."""
    if product.terms < MIN_TERMS:
        return None
    alike = replace(
        product,
        columns=near(product.columns),
        depth=near(product.depth),
        left_strides=(near(product.depth), 1),
        right_strides=(1, near(product.depth)),
    )
    measure = functools.partial(_measured, alike)
    texts = Int8WeightProductPrinter.texts()
    return times.slower(f"multiplies {product}", f"weights {alike}", measure, texts)


def _measured(product: Int8WeightProduct) -> tuple[float, float]:
    rows, depth, columns = product.rows, product.depth, product.columns
    left = torch.ones(rows, depth)
    weight = strided((columns, depth), (depth, 1), torch.int8)
    numbers, result = weight.float(), torch.empty(rows, columns)
    source = _TRIAL.replace("ROWS", str(rows))
    function = times.trial_function("\n".join([*Int8WeightProductPrinter.texts(), source]))
    function.argtypes = [ctypes.c_void_p] * 4
    sizes = (ctypes.c_long * 3)(depth, columns, torch.get_num_threads())
    pointers = [t.data_ptr() for t in (left, weight, result)]

    def kernel() -> None:
        function(*pointers, ctypes.addressof(sizes))

    def library() -> None:
        F.linear(left, numbers)

    def before() -> None:  # a model's other weights have pushed it out of the caches
        push_out(numbers)
        push_out(weight)

    return times.fastest(kernel, library, before=before)


_TRIAL = f"""
extern "C" void fx_trial(const float* a, const signed char* b, float* c, const long* n) {{
  const long depth = n[0], columns = n[1];
#pragma omp parallel for num_threads(n[2]) if (n[2] > 1) schedule(static)
  for (long from = 0; from < columns; from += {COLUMNS}) {{
    alignas(64) float sums[ROWS * {COLUMNS}];
    const long wide = columns - from < {COLUMNS} ? columns - from : {COLUMNS};
    fx_int8_weight_product(a, depth, b + from * depth, depth, ROWS, wide, depth, sums);
    for (long r = 0; r < ROWS; ++r)
      for (long j = 0; j < wide; ++j) c[r * columns + from + j] = sums[r * {COLUMNS} + j];
  }}
}}
"""
