"""Functions that are given other numbers where they have no value, and conditions as numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fxkit.lower import to_cpp
from tests.lower.kernels import ALWAYS
from tests.lower.test_cpp_printer import text_of

FUNCTIONS = [torch.asin, torch.acos, torch.log2, torch.log10]


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
