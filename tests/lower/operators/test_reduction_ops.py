"""Every reduction against float64, with eager's own error as the measure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.operators.reduction_ops import TABLE
from tests.lower.kernels import ALWAYS, compile_all, difference, fused_names
from tests.lower.operators.reduction_cases import (
    CALLS,
    IN_STEPS,
    cases,
    error,
    results,
    shortfall,
    wide,
)
from tests.sampling import one_in

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def test_each_row_has_a_case() -> None:
    torchs = {name for name in TABLE if name.partition(".")[0] in ("aten", "torch")}
    assert set(CALLS) == {name for name in torchs if TABLE[name].domain is None}


@pytest.mark.filterwarnings(r"ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((torch.float32, shape) for shape in ((2, 3, 1), (1, 4, 2500))),
        pytest.param(torch.float32, (2, 130, 64), marks=pytest.mark.sweep),
        *one_in(2, FLOATS, [(3, 5, 17)]),
    ],
    ids=str,
)
def test_rows_are_as_exact_as_eager(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = cases(shape, dtype)
    expectations = [results(f(*a, **k)) for _, f, a, k in rows]
    compiled, inputs, nodes = compile_all(
        [(f, a, k) for _, f, a, k in rows], [len(expected) for expected in expectations]
    )
    fused = fused_names(compiled)
    wrong = []
    for (name, function, args, options), node, eager, all_found in zip(
        rows, nodes, expectations, compiled(*inputs), strict=True
    ):
        call = f"{name}{options}"
        is_left = name in IN_STEPS and dtype.itemsize == 2
        if node.name not in fused and 1 not in shape and not is_left:
            wrong.append(f"{call} is not fused")
        precise = {k: v if k == "dtype" else wide(v) for k, v in options.items()}
        exact = results(function(*map(wide, args), **precise))
        for found, expected, true in zip(results(all_found), eager, exact, strict=True):
            problem = shortfall(found, expected, true)
            wrong += [f"{call}: {problem}"] if problem else []
    assert not wrong, "\n".join(wrong)


def test_all_results_of_a_norm_are_fused() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normalised, mean, scale = torch.native_layer_norm(x * 2, [64], w, b, 1e-5)
        return normalised + mean, scale, scale.reshape(-1)

    inputs = torch.randn(32, 64), torch.randn(64), torch.randn(64)
    compiled = to_cpp(fxkit.capture(program, inputs).graph_module, inputs)
    assert [len(r.nodes) for r in compiled.regions] == [3]
    for found, expected in zip(compiled(*inputs), program(*inputs), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_infinities_and_nan_are_as_in_eager(dtype: torch.dtype) -> None:
    x = torch.randn(6, 40).to(dtype)
    x[0] = -math.inf
    x[1, 3] = math.inf
    x[2, 5] = math.nan
    x[3, :7] = -math.inf
    x[4] = math.inf
    functions: list[Any] = [F.softmax, F.log_softmax, torch.logsumexp, torch.sum, torch.mean,
                            torch.amax, torch.amin]  # fmt: skip
    calls = [(function, (x.clone(),), {"dim": -1}) for function in functions]
    compiled, inputs, nodes = compile_all(calls)
    assert len(fused_names(compiled)) == len(nodes)
    for (function, args, options), found in zip(calls, compiled(*inputs), strict=True):
        assert difference(found, function(*args, **options)) <= 8, function


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_folds_of_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (7, 33)).to(dtype)
    functions: list[Any] = [torch.sum, torch.amax, torch.amin, torch.logsumexp]
    compiled, inputs, nodes = compile_all([(f, (x.clone(),), {"dim": -1}) for f in functions])
    assert len(fused_names(compiled)) == len(nodes)
    for function, found in zip(functions, compiled(*inputs), strict=True):
        assert difference(found, function(x, dim=-1)) <= 8, function


def test_long_sums_stay_accurate() -> None:
    x = torch.rand(2, 300_001) + 1000
    compiled, inputs, _ = compile_all([(torch.sum, (x,), {"dim": -1})])
    exact = x.double().sum(-1)
    assert fused_names(compiled)
    assert error(compiled(*inputs)[0], exact) <= 2 * error(x.sum(-1), exact) + 2**-23


def test_permuted_and_expanded_rows() -> None:
    base = torch.randn(6, 5, 40)
    views = [
        base.permute(2, 0, 1),
        base.transpose(0, 1),
        base[:, ::2, 3:],
        torch.randn(6, 1, 40).expand(6, 5, 40),
        torch.randn(6, 5, 1).expand(6, 5, 40),
    ]
    options: list[dict[str, Any]] = [{"dim": -1}, {"dim": (0, 2)}, {"dim": 0}]
    for dims in options:
        calls = [(torch.mean, (view,), dims) for view in views]
        compiled, inputs, nodes = compile_all(calls)
        assert len(fused_names(compiled)) == len(nodes)
        for view, found in zip(views, compiled(*inputs), strict=True):
            torch.testing.assert_close(found, view.mean(**dims))
            assert found.stride() == view.mean(**dims).stride()


@pytest.mark.parametrize("width", [5, 20, 77, 3000])
def test_rows_of_equal_numbers_have_no_spread(width: int) -> None:
    x = torch.tensor([[1000.1], [-3.2739], [3e-5], [0.0]]).expand(4, width).contiguous()
    functions: list[Any] = [lambda x: F.layer_norm(x, [width]), lambda x: torch.std(x, -1),
                            lambda x: F.instance_norm(x[None])]  # fmt: skip
    for function in functions:
        found = to_cpp(fx.symbolic_trace(function), (x,), policy=ALWAYS)(x)
        torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-5)


def test_spread_of_rows_that_are_not_finite_or_whose_squares_overflow() -> None:
    x = torch.randn(6, 77)
    x[:5, 3] = torch.tensor([math.inf, -math.inf, math.nan, 1e38, -3e38])
    x[:3, 70] = torch.tensor([-math.inf, -math.inf, 1.0])
    for function in (lambda x: torch.var(x, -1), lambda x: F.instance_norm(x[None])):
        compiled = to_cpp(fx.symbolic_trace(function), (x,), policy=ALWAYS)
        found, expected = compiled(x), function(x)
        assert compiled.report().fused == compiled.report().candidates
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_spread_whose_squares_are_no_float32(dtype: torch.dtype, dim: int) -> None:
    x = (torch.randn(300, 77, generator=torch.Generator().manual_seed(1)) * 1e20).to(dtype)
    pair = torch.std_mean
    for function in (lambda x: (x.std(dim),), lambda x: (pair(x, dim)[0], pair(x, dim)[1])):
        compiled = to_cpp(fx.symbolic_trace(function), (x,), policy=ALWAYS)
        assert compiled.report().fused == compiled.report().candidates
        for found, expected in zip(compiled(x), function(x), strict=True):
            assert found.dtype == dtype and found.isfinite().all()
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(3, 2000), (64, 7), (5, 40)])
def test_shares_that_are_subnormal(shape: tuple[int, int]) -> None:
    x = torch.rand(shape) * -160
    x[:, 0] = 0
    x[:, 1] = -torch.inf
    found = to_cpp(fxkit.capture(lambda x: x.softmax(-1), (x,)).graph_module, (x,))(x)
    exact = x.double().softmax(-1)
    unit = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    error = (found.double() - exact).abs() / unit
    assert error.max() <= 4 and error[exact < 2.0**-126].max() <= 2
    assert (found[:, 1] == 0).all() and ((found > 0) & (found < 2.0**-126)).any()
