"""Functions that are given other numbers where they have no value, and conditions as numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxkit.lower import to_cpp
from tests.lower.kernels import ALWAYS, text_of

FUNCTIONS = [torch.asin, torch.acos, torch.log2]


def every_range() -> Tensor:
    bits = torch.arange(-(2**31), 2**31, 10007, dtype=torch.int64).to(torch.int32)
    special = [0.0, -0.0, 1.0, -1.0, 1.0000001, -1.0000001, torch.inf, -torch.inf, torch.nan, 1e-45]
    return torch.cat(
        [bits.view(torch.float32), torch.tensor(special), torch.linspace(-1.1, 1.1, 999)]
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_has_no_value_and_what_has_one(function: Callable[[Tensor], Tensor]) -> None:
    for x in (every_range(), every_range().half(), every_range().double()):
        module = to_cpp(fx.symbolic_trace(lambda x: function(x) + 0), (x,), policy=ALWAYS)
        name = f"fx_{function.__name__}("
        assert (module.source.count(name) == 2) == (x.dtype != torch.float64)
        found, expected = module(x), function(x)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())
        finite = expected.isfinite()
        assert torch.allclose(found[finite], expected[finite], rtol=1e-3, atol=1e-6)


def test_a_condition_becomes_a_number_by_a_choice() -> None:
    x = torch.randn(8, 512)
    assert " ? 1.0f : 0.0f" in text_of(lambda x: torch.sign(x) * 2, x)


# What each makes of numbers that no integer is near is known to the compiler.
NUMBERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.full_like(x, torch.nan),
    lambda x: torch.full_like(x, -torch.inf),
    lambda x: x.clamp(-6e4, 6e4),
    lambda x: torch.where(x > 2, 6e4, x),
    lambda x: torch.where(x > 2, 6e4, 1.0) * 6e4,
    lambda x: x.amax(-1),
    lambda x: F.pad(x, (1, 1), value=torch.inf) + 1,
    torch.abs,
]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [9, 63])
def test_what_no_integer_is_near_becomes_one_as_in_eager(dtype: torch.dtype, size: int) -> None:
    edges = [2.0**k + d for k in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, 0, 1, 513)]
    special = [torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.5, -0.5, -0.0, 129.7]
    x = torch.tensor([*edges, *(-e for e in edges), *special], dtype=torch.float64).to(dtype)
    x = x[: len(x) // size * size].view(-1, size) if size < len(x) else x[None]

    def program(x: Tensor) -> tuple[Tensor, ...]:
        whole = [(number(x), d) for number in NUMBERS for d in INTEGERS]
        there = [value.to(d) for value, d in whole]
        return *there, *(i.to(dtype) for i in there)

    found = to_cpp(fx.symbolic_trace(program), (x,), policy=ALWAYS)(x)
    for one, expected in zip(found, program(x), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=0)
