"""Every row program against float64, with eager's own error as the measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.operators.row_ops import TABLE
from tests.lower.kernels import compile_all, difference, fused_names

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _layer_norm(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], **options)


# Operator identity → calls of it: a function of one tensor and keyword arguments.
CALLS: dict[str, list[tuple[Callable[..., torch.Tensor], dict[str, Any]]]] = {
    "aten.sum": [
        (torch.sum, {"dim": -1}),
        (torch.sum, {"dim": (0, 2), "keepdim": True}),
        (torch.sum, {"dim": 1, "dtype": torch.float64}),
        (torch.sum, {}),
    ],
    "aten.mean": [(torch.mean, {"dim": -1}), (torch.mean, {"dim": (1, 2)})],
    "aten.amax": [(torch.amax, {"dim": -1}), (torch.amax, {"dim": 0, "keepdim": True})],
    "aten.amin": [(torch.amin, {"dim": -1}), (torch.amin, {"dim": (0, 1)})],
    "aten.var": [(torch.var, {"dim": -1}), (torch.var, {"dim": 1, "correction": 0})],
    "aten.std": [(torch.std, {"dim": -1}), (torch.std, {"dim": (1, 2), "keepdim": True})],
    "aten.linalg_vector_norm": [
        (torch.linalg.vector_norm, {"dim": -1}),
        (torch.linalg.vector_norm, {"ord": 1, "dim": 1}),
        (torch.linalg.vector_norm, {"ord": math.inf, "dim": -1}),
    ],
    "aten.norm": [(torch.ops.aten.norm, {"p": 2, "dim": [-1]})],
    "torch.nn.functional.normalize": [(F.normalize, {}), (F.normalize, {"dim": -1, "eps": 0.1})],
    "aten.softmax": [(F.softmax, {"dim": -1}), (F.softmax, {"dim": 1})],
    "aten.log_softmax": [(F.log_softmax, {"dim": -1}), (F.log_softmax, {"dim": 0})],
    "aten.logsumexp": [(torch.logsumexp, {"dim": -1})],
    "aten.layer_norm": [(_layer_norm, {}), (_layer_norm, {"eps": 0.1})],
    "aten.native_layer_norm": [],
    "aten.rms_norm": [],
}

WEIGHTED = {
    "aten.layer_norm": F.layer_norm,
    "aten.rms_norm": F.rms_norm,
    "aten.native_layer_norm": torch.native_layer_norm,
}


def cases(shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[str, Any, tuple, dict]]:
    """Return `(operator, function, arguments, keyword arguments)` on inputs of one shape."""
    x = (torch.randn(shape, dtype=torch.float64) * 2 + 1).to(dtype)
    weight, bias = (torch.randn(shape[-1], dtype=torch.float64).to(dtype) for _ in "wb")
    found: list[tuple[str, Any, tuple, dict]] = []
    for name, calls in CALLS.items():
        for function, options in calls:
            if function is _layer_norm:
                found.append((name, F.layer_norm, (x.clone(), [shape[-1]]), options))
            elif options.get("dtype") is None or dtype == torch.float32:
                found.append((name, function, (x.clone(),), options))
    for name, function in WEIGHTED.items():
        parameters = (
            (weight.clone(),) if name == "aten.rms_norm" else (weight.clone(), bias.clone())
        )
        eps = (1e-5,) if name == "aten.native_layer_norm" else ()
        found.append((name, function, (x.clone(), [shape[-1]], *parameters, *eps), {}))
    return found


def first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) else value


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error relative to the largest number."""
    scale = exact.double().abs().max().clamp(min=1e-30)
    return float((found.double() - exact.double()).abs().max() / scale)


def test_each_row_has_a_case() -> None:
    assert set(CALLS) | set(WEIGHTED) == set(TABLE)


@pytest.mark.filterwarnings(r"ignore:(var|std)\(\). degrees of freedom is <= 0")
@pytest.mark.parametrize("shape", [(3, 5, 17), (2, 3, 1), (1, 4, 2500), (2, 130, 64)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_are_as_exact_as_eager(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = [case for case in cases(shape, dtype) if case[0] != "aten.native_layer_norm"]
    compiled, inputs, nodes = compile_all([(f, a, k) for _, f, a, k in rows])
    fused = fused_names(compiled)
    wrong = []
    for (name, function, args, options), node, found in zip(
        rows, nodes, compiled(*inputs), strict=True
    ):
        expected = function(*args, **options)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.stride() == expected.stride()
        if node.name not in fused and 1 not in shape:
            wrong.append(f"{name}{options} is not fused")
        exact = function(*map(wide, args), **{k: v for k, v in options.items() if k != "dtype"})
        if exact.isnan().any():
            assert torch.equal(found.isnan(), exact.isnan())
            continue
        ours, eagers = error(found, exact), error(expected, exact)
        # float64 is its own reference: eager's error shows as 0 there.
        units = 64 if dtype == torch.float64 else 4
        if ours > 2 * eagers + units * torch.finfo(expected.dtype).eps:
            wrong.append(f"{name}{options}: {ours:.3g}, eager {eagers:.3g}")
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
def test_integer_sums_and_extrema(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (7, 33)).to(dtype)
    functions: list[Any] = [torch.sum, torch.amax, torch.amin]
    compiled, inputs, nodes = compile_all([(f, (x.clone(),), {"dim": -1}) for f in functions])
    assert len(fused_names(compiled)) == len(nodes)
    for function, found in zip(functions, compiled(*inputs), strict=True):
        assert torch.equal(found, function(x, dim=-1))


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
