"""Threads scan a row together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxkit.lower.codegen.cuda.nest_printer import CudaNestPrinter
from fxkit.lower.loop_ir.nest_verifier import verify_nest
from fxkit.lower.scheduling.gpu.choose_thread_mapping import choose_mapping
from fxkit.lower.scheduling.gpu.distribute_rows import DistributeRows
from fxkit.lower.scheduling.gpu.plain_nest import plain_nest
from fxkit.lower.scheduling.pipelines import GPU
from tests.lower.scheduling.nests import before_and_after, computes_its_kernel, running


def test_threads_fold_their_parts_and_learn_what_came_before() -> None:
    _, after = before_and_after(running(4, 77), DistributeRows, is_aligned=False)
    assert str(after).endswith("""\
      f32 a1
      a1 = neutral element of add
      unrolled n < 3:
        f32 v0
        j = n * 32 + t
        f32 b1
        b1 = neutral element of add
        if j < 77:
          %0: f32 = load in0[77, 1]
          b1 = add(b1, %0)
        b1, a1 = add before and after b1 over t
        if j < 77:
          %1: f32 = b1 = add(b1, %0)
          store out0[77, 1] %1""")


@pytest.mark.parametrize(("length", "width"), [(64, 1), (65, 1), (300, 1), (300, 4), (512, 4)])
def test_long_rows_are_walked_by_all_threads_together(length: int, width: int) -> None:
    kernel = running(3, length)
    nest = plain_nest(kernel)
    chosen = choose_mapping(kernel, width)
    nest = replace(nest, mapping=replace(chosen, threads=64, group=64, items=0))
    for one in GPU[1:]:
        nest = one.apply(nest)
        verify_nest(nest)
        computes_its_kernel(nest)
    (launch,) = CudaNestPrinter(nest, "k").launches()
    assert f"for (int n = 0; n < {-(-length // (64 * width))}; ++n)" in launch.text
    assert "fx_scan<64, FxAdd>(b1, a1);" in launch.text


def test_columns_are_scanned_by_a_thread_each() -> None:
    before, after = before_and_after(running(130, 60, down=True), DistributeRows)
    assert "thread t <" not in str(after)
    assert "%1: f32 = a1 = add(a1, %0)" in str(after)
    assert "lanes" not in str(before)
