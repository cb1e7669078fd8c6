"""Results of 8 bits behind integer products: stored by loops of their own."""

from __future__ import annotations

import pytest
import torch

import fxkit
from fxkit.lower.compiling import whole_operators
from fxkit.lower.families.integer_products.custom_op import operator
from fxkit.torch_adapters.quantized_operators import quantized_operators
from tests.sampling import one_in


@pytest.fixture(autouse=True)
def in_kernels(monkeypatch):
    """Let kernels compute each product, also where that is slower."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: None)


@pytest.mark.parametrize(
    ("columns", "kind"),
    one_in(3, [1, 15, 24, 64, 96, 150], [(torch.uint8, 0), (torch.uint8, 7), (torch.int8, -3)]),
)
def test_bytes_are_those_of_eager(columns, kind):
    dtype, zero = kind
    left = torch.randint(-128, 128, (70, 30), dtype=torch.int8)
    right = torch.randint(-128, 128, (columns, 30), dtype=torch.int8)
    scale = torch.rand(columns) / 100
    limits = torch.iinfo(dtype)

    def program(left, right, scale):
        value = operator()(left, right.t()).to(torch.float32) * scale
        quantise = quantized_operators().quantize_per_tensor
        integers = quantise(value, 0.7, zero, limits.min, limits.max, dtype)
        return integers, value.sigmoid()

    compiled = fxkit.compile(program)
    compiled(left, right, scale)  # the first call runs the program itself
    for found, expected in zip(
        compiled(left, right, scale), program(left, right, scale), strict=True
    ):
        assert found.dtype == expected.dtype
        is_exact = not found.is_floating_point()
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if is_exact else 1e-6)
    assert "narrow" in compiled.compiled_modules[-1].source
