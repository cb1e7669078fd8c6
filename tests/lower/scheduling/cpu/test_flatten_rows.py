"""Short rows, handled as one long row: the same results as eager's, whatever is broadcast."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower import CompiledModule, to_cpp
from tests.lower.kernels import ALWAYS

Program = Callable[..., Tensor]

LENGTHS = [2, 3, 7, 15, 17, 31, 100, 255]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(program: Program, *args: Tensor, is_joined: bool = True) -> None:
    """Compare a program's kernel with eager, and see whether its rows were joined."""
    compiled = to_cpp(fxkit.symbolic_trace(program), args, policy=ALWAYS)
    with torch.no_grad():
        found = compiled(*args)
    expected = program(*args)
    assert compiled.report().calls == 1
    assert found.stride() == expected.stride() and found.dtype == expected.dtype
    if not expected.is_floating_point():
        assert torch.equal(found, expected)
    else:
        exact = program(*(a.double() for a in args))
        ours, eager = ((it.double() - exact).nan_to_num(0) for it in (found, expected))
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())
        assert ours.abs().max() <= 2 * eager.abs().max() + 1e-30
    assert bool(re.search(r"\bx\d+\[\w+ - begin\]", compiled.source)) == is_joined


def gelu_of_sum(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x + y)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rows", [2, 37, 4099])
def test_an_operand_for_all_rows(length: int, rows: int) -> None:
    check(gelu_of_sum, randn(rows, length), randn(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_an_operand_for_each_row(length: int) -> None:
    check(gelu_of_sum, randn(501, length), randn(501, 1))


@pytest.mark.parametrize(
    ("shape", "is_joined"),
    [((5, 1, 7), True), ((1, 301, 1), True), ((5, 301, 1), True), ((301, 7), False)],
)
def test_three_axes(shape: tuple[int, ...], is_joined: bool) -> None:
    check(gelu_of_sum, randn(5, 301, 7), randn(*shape), is_joined=is_joined)


def test_operands_of_several_kinds() -> None:
    def program(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x * y + z) * w - x

    check(program, randn(1001, 11), randn(11), randn(1001, 1), torch.tensor(1.7))


def test_operands_that_lie_apart() -> None:
    check(gelu_of_sum, randn(700, 9), randn(18)[::2])
    check(gelu_of_sum, randn(700, 9), randn(700, 20)[:, 3:12])
    check(gelu_of_sum, randn(700, 9), randn(9, 700).t(), is_joined=False)
    check(gelu_of_sum, randn(700, 9), randn(1500, 1)[100:800])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
)
def test_dtypes(dtype: torch.dtype) -> None:
    x, y = (randn(1000, 7) * 9).to(dtype), (randn(7) * 9).to(dtype)
    check(lambda x, y: torch.maximum(x * y, y) + x, x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [7, 33])
def test_functions_of_rounded_numbers(length: int, dtype: torch.dtype) -> None:
    x, y = randn(1000, length, dtype=dtype), randn(length, dtype=dtype)
    check(lambda x, y: torch.exp(torch.maximum(x, y)), x, y)
    check(lambda x, y: torch.exp(torch.maximum(x, y)), x, randn(1000, 1, dtype=dtype))


def test_special_values() -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, 3e38])
    check(lambda x, y: torch.sigmoid(x) * y, special.repeat(300, 1), special)
    check(
        lambda x, y: torch.sigmoid(x * y),
        special.repeat(300, 1),
        special[:, None].repeat(300, 1)[:300],
    )


def test_angles_near_zero_and_far_away() -> None:
    x = randn(900, 5)
    x[450, 2] = 1e8
    check(lambda x, y: torch.sin(x * y), x, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))


def test_several_results_and_types() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.exp(x - y), x > y, (x * y).double()

    x, y = randn(800, 13), randn(13)
    compiled = fxkit.compile(program)
    for _ in range(2):
        found = compiled(x, y)
    for ours, eager in zip(found, program(x, y), strict=True):
        torch.testing.assert_close(ours, eager)


def test_what_is_left_as_it_is() -> None:
    check(gelu_of_sum, randn(100, 32), randn(32), is_joined=False)  # full vectors
    check(gelu_of_sum, randn(100, 300), randn(300), is_joined=False)  # a long row
    check(gelu_of_sum, randn(100, 7), randn(100, 7), is_joined=False)  # one row already
    check(
        lambda x, y: x * 2 + y, randn(100, 7), randn(100, 1), is_joined=False
    )  # writing out costs more


@torch.no_grad()
def test_several_threads() -> None:
    x, y = randn(60000, 7), randn(7)
    compiled = fxkit.compile(gelu_of_sum)
    compiled(x, y)
    torch.testing.assert_close(compiled(x, y), gelu_of_sum(x, y))


@torch.no_grad()
def test_free_numbers_of_rows_and_lengths() -> None:
    compiled = fxkit.compile(gelu_of_sum, dynamic=True)
    for rows, length in ((5, 6), (6, 7), (40000, 7), (40001, 7), (70, 7), (50000, 6), (900, 300)):
        x, y = randn(rows, length), randn(length)
        for _ in range(2):
            torch.testing.assert_close(compiled(x, y), gelu_of_sum(x, y))
    builds = compiled.builds
    for rows in (40002, 50001, 60003):
        x, y = randn(rows, 7), randn(7)
        torch.testing.assert_close(compiled(x, y), gelu_of_sum(x, y))
    assert compiled.builds == builds
    module = compiled.compiled_modules[-1]
    assert isinstance(module, CompiledModule) and "[j - begin]" in module.source
