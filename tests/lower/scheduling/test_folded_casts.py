"""Casts to integers and back are no truncation: the zero that they give has no sign."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fxkit

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)

PROGRAMS: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "divided": lambda x, integer: 1 / x.to(integer).to(x.dtype),
    "chosen": lambda x, integer: torch.where(x > 7, x, x.to(integer)),
    "scaled": lambda x, integer: x.to(integer).to(x.dtype) / -2.0,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("length", [1, 17, 85])
def test_zeros_of_integers_have_no_sign(dtype: torch.dtype, length: int) -> None:
    values = torch.tensor([-0.5, -0.0, 0.0, 0.5, -1.5, 2.5, -0.9, 0.3, -3.0])
    x = values.repeat(10)[:length].to(dtype)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each(x, integer) for each in PROGRAMS.values() for integer in INTEGERS)

    compiled = fxkit.compile(program)
    compiled(x)
    for found, expected in zip(compiled(x), program(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert torch.equal(found.signbit(), expected.signbit())
