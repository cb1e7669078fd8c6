"""Maxima that do not look for NaN, since all that is computed of them tells of it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower import CompiledModule, to_cpp
from tests.sampling import one_in

TOLD: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmin": lambda x: F.softmin(x, -1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "scaled": lambda x: (x * 0.125).softmax(-1) * 3 + 1,
    "in whole numbers": lambda x: x.softmax(-1).isnan(),
    "chosen": lambda x: torch.where(x > 0, x.softmax(-1), x).clamp(min=0.01),
    "two of one row": lambda x: (x.softmax(-1), x.log_softmax(-1)),
}
NOT_TOLD: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "amax": lambda x: x.amax(-1),
    "argmax": lambda x: x.argmax(-1),
    "less the maximum": lambda x: x - x.amax(-1, keepdim=True),
    "where it is the maximum": lambda x: x.eq(x.amax(-1, keepdim=True)),
    "the maximum as well": lambda x: (x.softmax(-1), x.amax(-1)),
    "chosen among": lambda x: torch.where(x > 0, x.softmax(-1), x.amax(-1, keepdim=True)),
    "the rest": lambda x: (x - x.amax(-1, keepdim=True)).clamp(min=-1).sum(-1, keepdim=True).relu(),
}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def compiled(fn: Callable[..., object], x: Tensor) -> CompiledModule:
    return to_cpp(fxkit.capture(fn, (x,)).graph_module, (x,))


def looks_for_nans(module: CompiledModule) -> bool:
    return bool(re.search(r"\bnan\d+", module.source))


@pytest.mark.parametrize("name", TOLD)
def test_no_search_where_the_results_tell(name: str) -> None:
    module = compiled(TOLD[name], torch.randn(40, 100))
    assert all(region.kernel for region in module.regions) and not looks_for_nans(module)


@pytest.mark.parametrize("name", NOT_TOLD)
def test_a_search_where_a_result_would_not_tell(name: str) -> None:
    module = compiled(NOT_TOLD[name], torch.randn(40, 100))
    assert looks_for_nans(module)


@pytest.mark.parametrize("name", NOT_TOLD)
def test_a_search_finds_nans(name: str) -> None:
    compare(NOT_TOLD[name], (9, 300), torch.float32)


@pytest.mark.parametrize(
    ("shape", "name"),
    one_in(3, [(3, 1), (64, 5), (9, 16), (4, 33), (2, 300), (3, 5000)], TOLD),
)
def test_rows_of_many_lengths(name: str, shape: tuple[int, int]) -> None:
    compare(TOLD[name], shape, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "shape", "name"),
    one_in(3, [torch.float64, torch.bfloat16, torch.float16], [(64, 5), (4, 320)], TOLD),
)
def test_dtypes(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    compare(TOLD[name], shape, dtype)


def compare(fn: Callable[[Tensor], object], shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Compare with eager where rows have NaNs, infinities, or both, and one has nothing else."""
    x = torch.randn(shape).to(dtype)
    module = compiled(fn, x)
    tolerance = TOLERANCES[dtype]
    for special in ((), (torch.nan,), (torch.inf,), (-torch.inf,), (torch.nan, torch.inf)):
        y = x.clone()
        for number in special:
            y[torch.rand(shape) < 1.5 / shape[1]] = number
        y[-1] = special[0] if special else 0
        found, expected = module(y), fn(y)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_that_lie_apart(dim: int) -> None:
    x = torch.randn(30, 40, 50)
    module = compiled(lambda x: x.softmax(dim), x)
    for _ in range(5):
        x[torch.rand(x.shape) < 0.02] = torch.nan
        torch.testing.assert_close(module(x), x.softmax(dim), equal_nan=True)
