"""Products by 4-bit integers in groups: the sum of a group is exact, whatever its numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fxkit
from fxkit.lower.compiling import whole_operators
from fxkit.lower.families.int4_products.custom_op import int4_product, operator
from fxkit.lower.loop_ir.nibbles import packed_nibbles, unpacked_nibbles
from tests.sampling import examples


@pytest.fixture(autouse=True)
def in_kernels(monkeypatch):
    """Let kernels compute each product, also where that is slower."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: None)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
    if dtype == torch.float32:
        return torch.randn(shape)
    limits = torch.iinfo(dtype)
    if kind == "random":
        return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)
    return torch.full(shape, limits.min if kind == "least" else limits.max, dtype=dtype)


def exact(left: Tensor, weight: Tensor, scales: Tensor, points: Tensor | None, zeros) -> Tensor:
    """Return sums of groups in int64, or in float64 of floats, times their scales in float64."""
    group = weight.shape[1] // scales.shape[1]
    kind = torch.float64 if left.is_floating_point() else torch.int64
    factors = weight.to(kind).unflatten(1, (-1, group))
    if points is not None:
        factors = factors - points.to(kind)[..., None]
    rows = (left.to(kind) - zeros).unflatten(1, (-1, group))
    return torch.einsum("mgk,ngk->mgn", rows, factors).double().mul(scales.t()).sum(1)


def weight_in_groups(columns: int, depth: int, kind: str) -> Tensor:
    if kind == "random":
        return torch.randint(-8, 8, (columns, depth), dtype=torch.int8)
    return torch.full((columns, depth), -8 if kind == "least" else 7, dtype=torch.int8)


KINDS = st.sampled_from(["random", "random", "least", "largest"])


@examples(8, of=60)
@given(
    st.sampled_from([1, 2, 3, 4, 5, 13, 33, 50, 97]),
    st.sampled_from([2, 6, 20, 32, 64, 96, 128, 160, 256]),
    st.sampled_from([1, 2, 3, 7]),
    st.sampled_from([1, 3, 64, 65]),
    st.sampled_from([torch.int8, torch.uint8, torch.float32]),
    st.sampled_from([None, torch.int8, torch.int64, torch.float32]),
    st.tuples(KINDS, KINDS),
    st.sampled_from([None, 0, 3, -128]),
)
def test_sums_of_groups_are_exact(rows, group, count, columns, dtype, of_points, kinds, zero):
    """With scales that are powers of two, sums of so few terms are exact in float32, too."""
    depth = group * count
    left = drawn((rows, depth), dtype, kinds[0])
    weight = weight_in_groups(columns, depth, kinds[1])
    scales = 2.0 ** torch.randint(-2, 1, (columns, count))
    points = None if of_points is None else torch.randint(-8, 8, (columns, count)).to(of_points)
    zeros = None
    if dtype == torch.float32:
        zero = 0
    elif zero is None:
        zeros = torch.randint(-128, 128, (rows, 1), dtype=torch.int32)

    def program(left, packed, scales, points, zeros):
        return operator()(left, packed, scales, points, group, zeros, zero or 0)

    compiled = fxkit.compile(program)
    inputs = (left, packed_nibbles(weight), scales, points, zeros)
    compiled(*inputs)  # the first call runs the program itself
    found = compiled(*inputs)
    assert "fx_int4_product" in compiled.compiled_modules[-1].source
    shift = zeros if zeros is not None else zero or 0
    expected = exact(left, weight, scales, points, shift)
    if dtype == torch.float32:
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    else:
        if depth * 255 * 15 * 4 <= 2**24:  # of the largest terms, in steps of the least scale
            assert torch.equal(found.double(), expected)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1.0)
    slow = int4_product(left, inputs[1], scales, points, group, zeros, zero or 0)
    torch.testing.assert_close(slow.double(), expected, rtol=1e-5, atol=1.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@pytest.mark.parametrize("group", [4096, 6400])
def test_groups_may_be_longer_than_what_is_in_order_at_a_time(group, dtype):
    left = drawn((3, 2 * group), dtype, "random")
    weight, scales = weight_in_groups(5, 2 * group, "random"), torch.rand(5, 2) + 0.1
    points = torch.randint(-8, 8, (5, 2), dtype=torch.int8)
    compiled = fxkit.compile(lambda *given: operator()(*given, group))
    inputs = (left, packed_nibbles(weight), scales, points)
    compiled(*inputs)
    expected = exact(left, weight, scales, points, 0)
    error = (compiled(*inputs).double() - expected).norm() / expected.norm()
    assert error < 2e-6


def test_bad_scales_stay_in_their_rows():
    left, weight = torch.randn(3, 256), weight_in_groups(70, 256, "random")
    scales = torch.rand(70, 2)
    scales[3, 0], scales[5, 1] = torch.nan, torch.inf
    compiled = fxkit.compile(lambda *given: operator()(*given, None, 128))
    for _ in range(2):
        found = compiled(left, packed_nibbles(weight), scales)
    assert found[:, 3].isnan().all() and not found[:, 5].isfinite().any()
    assert found[:, [0, 1, 2, 4, 6, 69]].isfinite().all()


def test_two_integers_to_a_byte():
    integers = torch.arange(-8, 8, dtype=torch.int8).repeat(16, 1)
    integers[:, 1::2] = integers[:, ::2].flip(0)
    packed = packed_nibbles(integers)
    assert packed.shape == (16, 8) and packed.dtype == torch.int8
    assert torch.equal(unpacked_nibbles(packed), integers)
