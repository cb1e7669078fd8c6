"""Places of extrema and folds along rows: special numbers, every dtype, views, long rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import fx

import fxkit
from fxkit.lower import to_cpp
from tests.lower.kernels import ALWAYS, compile_all, difference, fused_names
from tests.sampling import one_in

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FOLDS: list[Any] = [torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin]
PLACES: list[Any] = [torch.argmax, torch.argmin, torch.max, torch.min, torch.aminmax]
COUNTS: list[Any] = [torch.any, torch.all, torch.count_nonzero, torch.sum, torch.prod]


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


def check(calls: list[Any], tolerance: float = 0) -> None:
    """Compare calls with eager, in epsilons."""
    expectations = [as_tuple(function(*args, **options)) for function, args, options in calls]
    compiled, inputs, nodes = compile_all(calls, [len(e) for e in expectations])
    assert {node.name for node in nodes} <= fused_names(compiled)
    for call, found, expected in zip(calls, compiled(*inputs), expectations, strict=True):
        for ours, eagers in zip(as_tuple(found), expected, strict=True):
            assert difference(ours, eagers) <= tolerance, (call[0], call[2])


@pytest.mark.parametrize("dtype", one_in(2, FLOATS), ids=str)
def test_special_numbers_are_as_in_eager(dtype: torch.dtype) -> None:
    x = torch.randn(9, 40, dtype=torch.float64)
    x[0] = -math.inf
    x[1, 3], x[1, 9] = math.inf, math.inf
    x[2, 5], x[2, 30] = math.nan, math.nan
    x[3, :7] = -math.inf
    x[4] = math.inf
    x[5] = x[5].round()
    x[6, 0] = math.nan
    x[7] = 0.0
    x[8, ::3] = -0.0
    functions = (*PLACES, *FOLDS, torch.nansum, torch.any, torch.all)
    calls = [(f, (x.to(dtype),), {"dim": d}) for f in functions for d in (-1, 0)]
    check(calls, 16)


@pytest.mark.parametrize("dtype", one_in(2, INTEGERS), ids=str)
def test_integers_are_as_in_eager(dtype: torch.dtype) -> None:
    x = torch.randint(0, 9, (7, 33)).to(dtype)
    folds = [f for f in FOLDS if f is not torch.logcumsumexp]
    calls = [(f, (x.clone(),), {"dim": d}) for f in (*PLACES, *folds, *COUNTS) for d in (-1, 0)]
    calls += [(f, (x.clone(),), {}) for f in (torch.argmax, torch.argmin, torch.max, *COUNTS)]
    check(calls)


def test_truth_values_are_as_in_eager() -> None:
    x = torch.randint(0, 2, (7, 33)).bool()
    functions: list[Any] = [torch.max, torch.min, torch.cumsum, torch.cummax, *COUNTS]
    check([(f, (x.clone(),), {"dim": d}) for f in functions for d in (-1, 0)])


def test_views_are_folded_as_in_eager() -> None:
    base = torch.randn(6, 5, 40)
    views = [
        base.permute(2, 0, 1),
        base[:, ::2, 3:],
        torch.randn(6, 1, 40).expand(6, 5, 40),
        torch.randn(6, 5, 1).expand(6, 5, 40),
        torch.randn(3, 1, 1),
    ]
    functions = [torch.cumsum, torch.cummax, torch.argmax, torch.max]
    calls = [(f, (v,), {"dim": d}) for f in functions for v in views[:4] for d in (0, 1, -1)]
    calls += [(torch.argmax, (view,), {}) for view in views[:4]]
    check(calls, 16)


def test_long_sums_are_as_exact_as_eager() -> None:
    x = torch.rand(2, 200_001) + 100
    calls: list[Any] = [
        (torch.cumsum, (x,), {"dim": 1}),
        (torch.logcumsumexp, (x - 100,), {"dim": 1}),
    ]
    compiled, inputs, _ = compile_all(calls)
    for (function, args, options), found in zip(calls, compiled(*inputs), strict=True):
        exact = function(args[0].double(), **options)
        ours, eagers = ((t - exact).abs().max() for t in (found, function(*args, **options)))
        assert ours <= 2 * eagers


def test_few_long_rows_are_left_to_the_threads_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(2, 70_000)
    gm = fxkit.capture(lambda x: x.var(), (x,)).graph_module
    for threads, is_fused in ((1, True), (8, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        (region,) = to_cpp(gm, (x,)).regions
        assert (region.kernel is not None) == is_fused
        assert is_fused or "divides its rows among threads" in str(region.reason)


def test_what_follows_a_fold_joins_it() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x * 2, -1) / (x.abs().amax(-1, keepdim=True) + 1)

    x = torch.randn(8, 50)
    compiled = to_cpp(fxkit.capture(program, (x,)).graph_module, (x,))
    assert len(compiled.regions) == 1
    torch.testing.assert_close(compiled(x), program(x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 37), (3, 40000)])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_scan_that_several_passes_need(
    dtype: torch.dtype, shape: tuple[int, int], dim: int
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        sums = torch.cumsum(x, dim)
        return (sums - sums.amax(dim, keepdim=True)).exp() + sums.mean(dim, keepdim=True)

    x = (torch.randn(shape) / 8).to(dtype)
    x = x.t().contiguous() if dim == 0 else x
    compiled = to_cpp(fx.symbolic_trace(program), (x,), policy=ALWAYS)
    exact, eager, found = program(x.double()), program(x), compiled(x)
    assert compiled.report().calls == 1
    torch.testing.assert_close(found, eager)
    error, usual = ((it.double() - exact).abs().max() for it in (found, eager))
    assert dtype == torch.float64 or error <= 2 * usual


def test_a_scan_along_an_axis_that_neighbours_divide() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        twice = torch.repeat_interleave(x, 2, -1)
        sums = torch.cumsum(twice, -1)
        return torch.stack([twice, sums / 3], dim=1)

    x = torch.randn(3, 1, 20)
    compiled = to_cpp(fx.symbolic_trace(program), (x,), policy=ALWAYS)
    torch.testing.assert_close(compiled(x), program(x))
