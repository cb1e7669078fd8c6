"""Bodies under construction: sharing, numbers and rounding."""

from __future__ import annotations

import math

import pytest
import torch

from fxkit.lower.loop_ir.builder import Builder
from fxkit.lower.loop_ir.loop_ir import Access, Unfusable


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
