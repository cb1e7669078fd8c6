"""Bodies under construction: sharing, rounding, numbers, and the merging of axes."""

from __future__ import annotations

import math

import pytest
import torch

from fxkit.lower.loops.axis_order import distinct_axes
from fxkit.lower.loops.loop_ir import (
    Access,
    Buffer,
    Builder,
    Kernel,
    Store,
    Unfusable,
)


def test_equal_instructions_are_made_once() -> None:
    builder = Builder()
    x = builder.load(Access(0, (1,)), torch.float32)
    assert ((x + 1) * 2).position == ((x + 1) * 2).position
    assert (x - x).position != (x + x).position
    assert len(builder.body) == 7


def test_numbers_that_only_look_equal_stay_apart() -> None:
    builder = Builder()
    zero = builder.const(0.0, torch.float32)
    assert zero.position != builder.const(-0.0, torch.float32).position
    assert zero.position != builder.const(0, torch.int64).position
    nan = builder.const(math.nan, torch.float32)
    assert nan.position == builder.const(math.nan, torch.float32).position


def test_numbers_are_rounded_as_torch_does() -> None:
    builder = Builder()

    def value(number: float, dtype: torch.dtype) -> object:
        return builder.body[builder.const(number, dtype).position].detail.value

    assert value(0.1, torch.float64) == 0.1
    assert value(0.1, torch.float32) == torch.tensor(0.1).item()
    assert value(0.1, torch.bfloat16) == torch.tensor(0.1).bfloat16().item()
    assert value(1e39, torch.float32) == math.inf
    assert value(2.7, torch.int64) == 2
    with pytest.raises(Unfusable, match="300 does not fit into u8"):
        builder.const(300, torch.uint8)
    with pytest.raises(Unfusable, match="inf"):
        builder.const(math.inf, torch.int32)


def test_half_precision_is_rounded_once() -> None:
    builder = Builder()
    x = builder.load(Access(0, (1,)), torch.bfloat16)
    assert x.dtype == torch.float32
    assert x.cast(torch.bfloat16).position == x.position
    y = (x + x).cast(torch.bfloat16)
    assert builder.body[y.position].op == "round"
    assert y.cast(torch.bfloat16).position == y.position
    assert builder.body[y.cast(torch.float16).position].detail == torch.float16


def test_axes_that_every_access_walks_as_one_are_merged() -> None:
    contiguous, bias = (60, 20, 1), (0, 0, 1)
    assert distinct_axes([contiguous], (2, 3, 20)) == [[0, 1, 2]]
    assert distinct_axes([contiguous, bias], (2, 3, 20)) == [[0, 1], [2]]
    assert distinct_axes([(60, 1, 3)], (2, 3, 20)) == [[0], [1], [2]]
    assert distinct_axes([(20, 7, 1)], (2, 1, 20)) == [[0, 2]]
    assert distinct_axes([(1,)], (1,)) == []


def test_a_kernel_as_text() -> None:
    builder = Builder()
    x = builder.load(Access(0, (16, 1)), torch.float32)
    largest = builder.reduce("max", x)
    powers = builder.scalar("exp", x - largest)
    y = powers / builder.reduce("add", powers)
    kernel = Kernel(
        (4, 16),
        1,
        (Buffer("in0", torch.float32, False), Buffer("out0", torch.float32, True)),
        tuple(builder.body),
        (Store(Access(1, (16, 1)), y.position),),
    )
    assert (
        str(kernel)
        == """\
kernel [4] [16]
  %0: f32 = load in0[16, 1]
  %1: f32 = reduce_max %0
  %2: f32 = sub %0, %1
  %3: f32 = exp %2
  %4: f32 = reduce_add %3
  %5: f32 = div %3, %4
  store out0[16, 1] %5"""
    )
    assert kernel.row_wide() == [True, False, True, True, False, True]
    assert kernel.points == 64
