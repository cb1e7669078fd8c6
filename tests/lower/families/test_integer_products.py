"""Products of 8-bit integers: exact for all sizes and numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fxkit
from fxkit.lower.compiling import whole_operators
from fxkit.lower.families.integer_products.custom_op import integer_product, operator


@pytest.fixture(autouse=True)
def in_kernels(monkeypatch):
    """Let kernels compute each product, also where that is slower."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: None)


def exact(left: Tensor, right: Tensor, zeros: Tensor | int) -> Tensor:
    return ((left.long() - zeros) @ right.long()).to(torch.int32)


def integers(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
    limits = torch.iinfo(dtype)
    if kind == "random":
        return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)
    return torch.full(shape, limits.min if kind == "least" else limits.max, dtype=dtype)


KINDS = st.sampled_from(["random", "random", "least", "largest"])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 5, 7, 16, 31, 32, 33, 64, 70, 390]),
    st.sampled_from([1, 2, 3, 5, 31, 63, 64, 65, 130, 1023, 1030]),
    st.sampled_from([1, 3, 16, 63, 64, 65, 130]),
    st.sampled_from([torch.int8, torch.uint8]),
    st.tuples(KINDS, KINDS),
    st.booleans(),
    st.sampled_from([None, 0, 3, -128, 255]),
)
def test_sums_are_exact(rows, depth, columns, dtype, kinds, is_turned, zero):
    left = integers((rows, depth), dtype, kinds[0])
    right = integers((columns, depth) if is_turned else (depth, columns), torch.int8, kinds[1])
    zeros = torch.randint(-128, 256, (rows, 1), dtype=torch.int32) if zero is None else None

    def program(left, right, zeros):
        factors = right.t() if is_turned else right
        return operator()(left, factors, zeros, zero or 0)

    compiled = fxkit.compile(program)
    compiled(left, right, zeros)  # the first call runs the program itself
    found = compiled(left, right, zeros)
    assert "fx_integer_product<" in compiled.compiled_modules[-1].source
    factors = right.t() if is_turned else right
    expected = exact(left, factors, zeros if zeros is not None else zero or 0)
    assert torch.equal(found, expected)
    assert torch.equal(integer_product(left, factors, zeros, zero or 0), expected)


def test_rows_may_lie_apart():
    left = integers((9, 200), torch.int8, "random")[:, 60:130]
    right = integers((70, 90), torch.int8, "random")[:, ::2]
    compiled = fxkit.compile(lambda left, right: operator()(left, right, None, 5))
    for _ in range(2):
        assert torch.equal(compiled(left, right), exact(left, right, 5))


def test_terms_that_lie_apart_are_left_to_torch():
    left, right = (integers((40, 40), torch.int8, "random") for _ in range(2))
    compiled = fxkit.compile(lambda left, right: operator()(left.t(), right, None, 5))
    for _ in range(2):
        assert torch.equal(compiled(left, right), exact(left.t(), right, 5))
    (module,) = compiled.compiled_modules
    assert "do not lie side by side" in str(module.report())
