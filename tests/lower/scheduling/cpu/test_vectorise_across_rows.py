"""Kernels down columns: tiles of every width, several passes, NaNs, few and many threads."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

import fxkit
from fxkit.lower import to_cpp
from tests.lower.kernels import ALWAYS
from tests.sampling import one_in

# Less than a tile, a tile, one more and one less, and tiles of each of the larger widths.
WIDTHS = (8, 63, 64, 65, 130, 1023, 1030, 2048, 2100)

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean of products": lambda x: (x * x).mean(0),
    "product": lambda x: x.prod(0),
    "extremes": lambda x: x.amax(0) - x.amin(0),
    "variance": lambda x: x.var(0),
    "softmax": lambda x: x.softmax(0),
    "running sum": lambda x: x.cumsum(0),
    "centred": lambda x: x - x.mean(0),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("width", WIDTHS)
def test_columns_are_as_near_to_float64_as_eagers(width: int) -> None:
    def program(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(fn(x) for fn, x in zip(PROGRAMS.values(), inputs, strict=True))

    inputs = tuple(torch.randn(70, width) for _ in PROGRAMS)
    module = to_cpp(fxkit.capture(program, inputs).graph_module, inputs)
    assert all(region.kernel for region in module.regions)
    exact = program(*(x.double() for x in inputs))
    for ours, eager, true in zip(module(*inputs), program(*inputs), exact, strict=True):
        worst = float((eager.double() - true).abs().max())
        assert torch.allclose(ours.double(), true, rtol=1e-6, atol=2 * worst)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_extreme_of_a_column_with_a_nan_is_a_nan(dtype: torch.dtype) -> None:
    x = torch.randn(50, 300).to(dtype)
    x[7, 3], x[0, 64], x[49, 299], x[5, 100], x[6, 101] = (math.nan,) * 3 + (math.inf, -math.inf)
    x[:, 150] = -math.inf
    for program in (lambda x: x.amax(0), lambda x: x.amin(0), lambda x: torch.aminmax(x, dim=0)):
        module = to_cpp(fx.symbolic_trace(program), (x,))
        torch.testing.assert_close(module(x), program(x), rtol=0, atol=0, equal_nan=True)


def test_a_column_over_itself_is_computed_once() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        y.copy_(x.sum(0) + y)
        return y

    x, y = torch.randn(20, 1030), torch.randn(1030)
    module = to_cpp(fx.symbolic_trace(program), (x, y))
    ours, eagers = y.clone(), y.clone()
    torch.testing.assert_close(module(x, ours), program(x, eagers))
    torch.testing.assert_close(ours, eagers)


@pytest.mark.parametrize("shape", [(8192, 17), (9001, 64), (20_000, 100)])
def test_long_columns_that_threads_share_are_the_same_for_any_number(
    shape: tuple[int, int],
) -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0), (x * x).mean(0) * 2, x.amin(0)

    x = torch.randn(shape)
    x[5000, 3], x[8191, 4] = math.nan, math.inf
    module, threads, found = to_cpp(fx.symbolic_trace(program), (x,)), torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(module(x))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    for ours, eager, exact in zip(found[0], program(x), program(x.double()), strict=True):
        worst = float((eager.double() - exact).abs().nan_to_num(0).max())
        assert torch.allclose(ours.double(), exact, rtol=1e-6, atol=2 * worst, equal_nan=True)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "a power": lambda x: x.abs() ** 0.7,
    "a function of a sum": lambda x: torch.tanh(x + x.sin()),
    "of a row's axes": lambda x: torch.sigmoid(x.view(5, 7, -1)).view(35, -1),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("dtype", "width", "name"), one_in(3, DTYPES, [8, 77, 130], KEPT))
def test_what_a_maximum_was_picked_from_is_equal_to_it(
    name: str, width: int, dtype: torch.dtype
) -> None:
    """What vectors and single elements are computed by differs, and so would what is left over."""

    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = KEPT[name](x)
        most = value.amax(0)
        return (value == most).sum(0), (most - value).sqrt(), (value > 0.5) & (most > 0.6)

    torch.manual_seed(width)
    module = None
    for _ in range(10):
        x = torch.randn(35, width).to(dtype)
        module = module or to_cpp(fx.symbolic_trace(program), (x,), policy=ALWAYS)
        counts, roots, conditions = module(x)
        assert (counts > 0).all() and not roots.isnan().any()
        assert torch.equal(conditions, program(x)[2])
    assert module is not None and "* 64 + l] = " in module.source


def test_several_axes_across_memory_are_kept_by_their_places() -> None:
    def program(x: Tensor) -> Tensor:
        value = torch.exp(x)
        return value / value.sum((0, 1)) - value.amax((0, 1))

    x = torch.randn(5, 6, 100)
    module = to_cpp(fx.symbolic_trace(program), (x,), policy=ALWAYS)
    assert "b1[" in module.source
    torch.testing.assert_close(module(x), program(x))


def test_too_long_columns_are_computed_again() -> None:
    x = torch.randn(3000, 16)
    module = to_cpp(fx.symbolic_trace(lambda x: x.softmax(0)), (x,), policy=ALWAYS)
    assert "l] = fx_exp" not in module.source
    torch.testing.assert_close(module(x), x.softmax(0))
