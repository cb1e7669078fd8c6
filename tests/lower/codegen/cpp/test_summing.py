"""Sums over all rows join the kernel of each row, and are as exact as eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fxkit
from fxkit.lower import CompiledModule, to_cpp
from fxkit.lower.codegen.cpp.summing import FEW
from fxkit.lower.fusion.column_sums import MAX_ROW
from tests.lower.kernels import ALWAYS

Program = Callable[..., Any]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def both(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Reduce rows, and sum over them, twice."""
    scaled = torch.softmax(x, -1) * y
    return scaled - scaled.sum(-1, keepdim=True), scaled.sum(0), (scaled * x).sum(0, keepdim=True)


def columns_first(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Sum over rows before they are reduced; the sum is seen through a view."""
    product = torch.tanh(x * y)
    total = product.sum(0, keepdim=True).view(-1)
    return total, product * product.sum(-1, keepdim=True)


def of_an_input(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.softmax(x + y, -1), y.sum(0)


def many_axes(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x, y = x.view(2, -1, x.shape[1]), y.view(2, -1, y.shape[1])
    return F.softmax(x * y, -1), (x * y).sum((0, 1))


def wider(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.softmax(x * y, -1), (x * y).sum(0, dtype=torch.float64)


def waves(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    wave = torch.sin(x * 9)
    return wave * wave.mean(-1, keepdim=True), wave.sum(0) + 0 * y[0]


PROGRAMS: dict[str, Program] = {
    "both": both, "columns_first": columns_first, "of_an_input": of_an_input,
    "many_axes": many_axes, "wider": wider,
}  # fmt: skip


def compiled(program: Program, *args: Tensor) -> CompiledModule:
    return to_cpp(fx.symbolic_trace(program), args, policy=ALWAYS)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def check(module: CompiledModule, program: Program, *args: Tensor) -> None:
    """Hold results to twice eager's distance from float64."""
    exact = program(*(arg.double() for arg in args))
    eager = program(*args)
    for found, near, true in zip(module(*args), eager, exact, strict=True):
        assert (found.shape, found.dtype, found.stride()) == (near.shape, near.dtype, near.stride())
        epsilon = 4 * torch.finfo(near.dtype).eps
        assert error(found, true) <= 2 * error(near, true) + epsilon
    assert not module.report().eager_calls


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", [(2, 9), (64, 40), (FEW - 2, 129), (1000, 16)])
def test_one_kernel_reduces_and_sums_over_rows(name: str, shape: tuple[int, int]) -> None:
    args = (torch.randn(shape), torch.randn(shape))
    module = compiled(PROGRAMS[name], *args)
    assert len(module.kernels) == 1
    (kernel,) = module.kernels.values()
    assert kernel.has_sums
    check(module, PROGRAMS[name], *args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_of_floats(dtype: torch.dtype) -> None:
    args = (torch.randn(300, 70).to(dtype), torch.randn(300, 70).to(dtype))
    module = compiled(both, *args)
    assert any(kernel.has_sums for kernel in module.kernels.values())
    check(module, both, *args)


@pytest.mark.parametrize("shape", [(64, MAX_ROW + 1), (1, 50), (300, 1), (0, 5), (5, 0)])
def test_other_shapes_are_summed_apart(shape: tuple[int, int]) -> None:
    args = (torch.randn(shape), torch.randn(shape))
    module = compiled(both, *args)
    assert not any(kernel.has_sums for kernel in module.kernels.values())
    for found, expected in zip(module(*args), both(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_across_memory_are_summed_apart() -> None:
    args = (torch.randn(90, 200).t(), torch.randn(90, 200).t())
    check(compiled(both, *args), both, *args)


def test_rows_of_a_larger_matrix() -> None:
    args = (torch.randn(200, 100)[:, 7:90], torch.randn(400, 83)[::2])
    module = compiled(both, *args)
    assert any(kernel.has_sums for kernel in module.kernels.values())
    check(module, both, *args)


def test_what_reads_the_sum_is_computed_after_it() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        weights = torch.softmax(x * y, -1)
        total = weights.sum(0)
        return weights * total, total.exp(), (total.view(1, -1) - weights).sqrt()

    args = (torch.randn(100, 48), torch.randn(100, 48))
    check(compiled(program, *args), program, *args)


def test_a_sum_that_is_read_by_what_reduces_rows_is_none_of_them() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        wave = torch.tanh(x)
        return ((wave - wave.sum(0)).sum(-1, keepdim=True) * wave,)

    x = torch.randn(100, 48)
    check(compiled(program, x), program, x)


def test_a_pass_that_is_repeated_far_from_zero_adds_once() -> None:
    args = (torch.randn(200, 64), torch.randn(200, 64))
    module = compiled(waves, *args)
    check(module, waves, *args)
    far = (args[0] * 1e6, args[1])
    torch.testing.assert_close(module(*far), waves(*far), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_nothing() -> None:
    args = (torch.randn(3001, 130), torch.randn(3001, 130))
    module = compiled(both, *args)
    torch.set_num_threads(1)
    alone = module(*args)
    torch.set_num_threads(3)
    assert all(torch.equal(a, b) for a, b in zip(alone, module(*args), strict=True))


def test_nan_and_infinity_reach_their_columns() -> None:
    x, y = torch.randn(100, 40), torch.randn(100, 40)
    y[50, 3], y[99, 7] = torch.nan, torch.inf
    module = compiled(of_an_input, x, y)
    _, total = module(x, y)
    assert total[3].isnan() and total[7].isposinf()
    assert total.isfinite().sum() == 38


def test_sizes_that_change_from_call_to_call() -> None:
    fast = fxkit.compile(both, dynamic=True)
    for rows, width in ((100, 40), (101, 40), (170, 41), (6, 300), (1333, 77)):
        args = (torch.randn(rows, width), torch.randn(rows, width))
        for _ in range(2):
            for found, expected in zip(fast(*args), both(*args), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
