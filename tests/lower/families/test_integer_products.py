"""Products of 8-bit integers: exact for all sizes and numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fxkit
from fxkit.lower.compiling import whole_operators
from fxkit.lower.families.integer_products import packed_weight
from fxkit.lower.families.integer_products.custom_op import integer_product, operator
from fxkit.lower.loop_ir.packed_panels import in_panels, panel_bytes, unpacked
from tests.sampling import examples


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


@examples(14, of=40)
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


@examples(10, of=30)
@given(
    st.sampled_from([1, 5, 31, 32, 33, 70, 390]),
    st.sampled_from([1, 3, 5, 63, 64, 65, 130, 1030]),
    st.sampled_from([1, 3, 63, 64, 65, 130]),
    st.sampled_from([torch.int8, torch.uint8]),
    KINDS,
    st.sampled_from([1, 2]),
    st.sampled_from([None, 0, 3, -128, 255]),
)
def test_sums_by_packed_weights_are_exact(rows, depth, columns, dtype, kind, halved, zero):
    left = integers((rows, depth), dtype, kind)
    weight = integers((columns, depth), torch.int8, "random") // halved
    slot = packed_weight.new_slot()
    zeros = torch.randint(-128, 256, (rows, 1), dtype=torch.int32) if zero is None else None

    def program(left, weight, zeros):
        packed = packed_weight.operator()(weight, slot)
        return operator()(left, packed, zeros, zero or 0, weight.shape[0])

    compiled = fxkit.compile(program)
    compiled(left, weight, zeros)  # the first call runs the program itself
    found = compiled(left, weight, zeros)
    assert "fx_packed_product<" in compiled.compiled_modules[-1].source
    expected = exact(left, weight.t(), zeros if zeros is not None else zero or 0)
    assert torch.equal(found, expected)
    packed = in_panels(weight)
    assert torch.equal(integer_product(left, packed, zeros, zero or 0, columns), expected)


@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (64, 64), (65, 63), (130, 1030)])
def test_a_packed_weight_is_the_weight(columns, depth):
    weight = integers((columns, depth), torch.int8, "random")
    packed = in_panels(weight)
    assert packed.shape == (-(-columns // 64), panel_bytes(depth))
    assert torch.equal(unpacked(packed, depth, columns), weight)


@pytest.mark.parametrize(
    ("pair", "fits"),
    [
        ((127, 1), True),
        ((127, 2), False),
        ((-128, 0), True),
        ((-64, -65), False),
        ((127, -128), True),
    ],
)
def test_pairs_that_fit_into_16_bits_are_told(pair, fits):
    weight = torch.zeros(3, 8, dtype=torch.int8)
    weight[1, 2:4] = torch.tensor(pair)
    assert in_panels(weight)[:, 256:260].view(torch.int32).item() == fits
    left = integers((9, 8), torch.uint8, "largest")
    assert torch.equal(
        integer_product(left, in_panels(weight), None, 0, 3), exact(left, weight.t(), 0)
    )
