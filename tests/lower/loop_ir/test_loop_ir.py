"""A kernel as text, and what varies along its rows."""

from __future__ import annotations

import torch

from fxkit.lower.loop_ir.builder import Builder
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Kernel, Store


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
    assert kernel.row_wide == [True, False, True, True, False, True]
    assert kernel.points == 64
