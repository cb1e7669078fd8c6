"""Products of float32 from parts in bfloat16, on processors with a unit that multiplies those."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import fxkit
from fxkit import config
from fxkit.lower import to_cpp
from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.compiling import whole_operators
from fxkit.lower.families.products import autotune as product_trial
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.product import Product
from tests.lower.kernels import beside_float64, rand
from tests.sampling import examples

needs_unit = pytest.mark.skipif(
    not matrix_unit.is_available(), reason="the processor multiplies no matrices of bfloat16"
)
SPLIT = "(matrices, threads, epilogue);"


@pytest.fixture
def in_kernels(monkeypatch):
    """Split each product, also where that is slower."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: None)


def lowered(program, *args):
    """Run a program with split products; return its result, eager's and that of float64."""
    compiled, *results = beside_float64(program, *args, policy=Policy(allows_bf16x3=True))
    assert SPLIT in compiled.source
    return results


def hold(program, *args):
    """Hold a program with split products to float64."""
    found, eager, exact = lowered(program, *args)
    bound = 2 * (eager - exact).norm() + 1e-7 * exact.norm()
    assert (found - exact).norm() <= bound


CASES = {
    "linear": (lambda x, w, b: F.linear(x, w, b), (256, 96), (640, 96), (640,)),
    "followed": (lambda x, w, b: F.gelu(F.linear(x, w, b)), (70, 40), (60, 40), (60,)),
    "a row": (lambda x, w: F.linear(x, w), (1, 700), (33, 700)),
    "a column": (lambda x, w: x @ w, (30, 40), (40, 1)),
    "a term": (lambda x, w: x @ w, (30, 1), (1, 70)),
    "deep": (lambda x, w: x @ w, (50, 3000), (3000, 50)),
    "more rows than a block has": (lambda x, w: F.linear(x, w), (1100, 33), (65, 33)),
    "left transposed": (lambda x, w: x.t() @ w, (200, 30), (200, 100)),
    "both transposed": (lambda x, w: x.t() @ w.t(), (200, 30), (100, 200)),
    "every other row": (lambda x, w: x[::2] @ w[:, ::3], (30, 20), (20, 100)),
    "batches that broadcast": (lambda x, w: x @ w, (2, 1, 7, 40), (3, 40, 9)),
}


@pytest.mark.one_in(5)
@needs_unit
@pytest.mark.parametrize("name", CASES)
def test_products(in_kernels, name):
    program, *shapes = CASES[name]
    hold(program, *[rand(*shape) for shape in shapes])


@needs_unit
@given(
    sizes=st.tuples(*[st.integers(1, 150)] * 3),
    layout=st.tuples(st.booleans(), st.booleans()),
    exponents=st.tuples(*[st.integers(-12, 12)] * 2),
)
@examples(3, of=10)
def test_any_sizes(sizes, layout, exponents):
    rows, columns, depth = sizes
    x = rand(depth, rows).mT if layout[0] else rand(rows, depth)
    y = rand(columns, depth).mT if layout[1] else rand(depth, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_operators, "objection", lambda *_: None)
        hold(lambda x, y: x @ y, x * 10.0 ** exponents[0], y * 10.0 ** exponents[1])


@pytest.mark.one_in(2)
@needs_unit
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3.4e38])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_stays_so(in_kernels, value, side):
    args = [rand(70, 100), rand(90, 100)]
    args[side][3, 5] = value
    found, eager, _ = lowered(lambda x, w: F.linear(x, w), *args)
    torch.testing.assert_close(found, eager, equal_nan=True)


@needs_unit
@pytest.mark.parametrize("scales", [(1e-37, 1e30), (1e-20, 1e-15), (1e-30, 1.0), (1.0, 1e-39)])
def test_numbers_near_nought_keep_their_digits(in_kernels, scales):
    x, w = rand(70, 100) * scales[0], rand(90, 100) * scales[1]
    hold(lambda x, w: F.linear(x, w), x, w)


@needs_unit
def test_the_number_of_threads_changes_nothing(in_kernels):
    x, w = rand(300, 200), rand(400, 200)
    gm = fx.symbolic_trace(lambda x, w: F.linear(x, w))
    compiled = to_cpp(gm, (x, w), policy=Policy(allows_bf16x3=True))
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(compiled(x, w))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_only_fast_splits_and_only_where_the_unit_is(monkeypatch, tmp_path):
    x, w = rand(64, 128), rand(128, 64)
    monkeypatch.setattr(product_trial, "_measured", lambda *_: (1.0, 2.0))

    def is_split(fast):
        compiled = fxkit.compile(lambda x, w: torch.relu(x @ w), fast=fast)
        with config.using_cache_dir(tmp_path), torch.no_grad():
            compiled(x, w)
        return SPLIT in compiled.compiled_modules[0].source

    assert not is_split(fast=False)
    assert is_split(fast=True) == matrix_unit.is_available()
    monkeypatch.setattr(matrix_unit, "is_available", lambda: False)
    assert not is_split(fast=True)


class TestTrial:
    product = Product(0, 1, (), 100, 100, 100, (100, 1), (1, 100), is_bf16x3=True)

    def test_a_processor_without_the_unit_says_so(self, monkeypatch):
        monkeypatch.setattr(matrix_unit, "is_available", lambda: False)
        assert "no unit that multiplies" in product_trial.objection(self.product)

    @needs_unit
    def test_it_is_timed_beside_whole_numbers_and_the_library(self, tmp_path):
        with config.using_cache_dir(tmp_path):
            kernel, other = product_trial._measured(self.product, 1)
        assert 0 < kernel < 1
        assert 0 < other < 1

    def test_the_slower_one_is_not_taken(self, monkeypatch, tmp_path):
        monkeypatch.setattr(matrix_unit, "is_available", lambda: True)
        monkeypatch.setattr(product_trial, "_measured", lambda *_: (2.0, 1.0))
        with config.using_cache_dir(tmp_path):
            assert "torch's library multiplies" in product_trial.objection(self.product)
