"""The loops of a kernel before any transformation."""

from __future__ import annotations

from fxkit.lower.loop_ir.nest_verifier import verify_nest
from fxkit.lower.scheduling.gpu.plain_nest import plain_nest
from tests.lower.scheduling.nests import centred, computes_its_kernel, doubled


def test_points_are_computed_one_by_one() -> None:
    nest = plain_nest(doubled(3, 5))
    assert (
        str(nest)
        == """\
parallel i0 < 3:
  parallel j < 5:
    %0: f32 = load in0[5, 1]
    %2: f32 = mul %0, 2.0
    store out0[5, 1] %2"""
    )
    verify_nest(nest)
    computes_its_kernel(nest)


def test_each_sweep_over_a_row_is_a_loop() -> None:
    nest = plain_nest(centred(2, 6))
    assert (
        str(nest)
        == """\
parallel i0 < 2:
  f32 a1
  a1 = neutral element of max
  for j < 6:
    %0: f32 = load in0[6, 1]
    a1 = max(a1, %0)
  %1: f32 = a1
  for j < 6:
    %0: f32 = load in0[6, 1]
    %2: f32 = div %0, %1
    store out0[6, 1] %2"""
    )
    verify_nest(nest)
    computes_its_kernel(nest)
