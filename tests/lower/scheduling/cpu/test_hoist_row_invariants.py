"""What all rows have in common: computed once, where it takes long, and as eager computes it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower import CompiledModule, to_cpp
from fxkit.lower.scheduling.cpu.hoist_row_invariants import MIN_ROWS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def compiled(fn: Callable[..., Tensor], *args: Tensor) -> CompiledModule:
    """Compile a program into one kernel, and compare it with eager."""
    module = to_cpp(fxkit.capture(fn, args).graph_module, args)
    assert [bool(region.kernel) for region in module.regions] == [True]
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(args[0].dtype, 2e-2)
    torch.testing.assert_close(module(*args), fn(*args), rtol=tolerance, atol=tolerance)
    return module


def normalised(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias).relu()


def of_columns(columns: int, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.rand(columns) + 0.5).to(dtype) for _ in range(4)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 64, 300, 4096])
def test_columns_are_prepared_once(columns: int, dtype: torch.dtype) -> None:
    module = compiled(normalised, torch.randn(20, columns).to(dtype), *of_columns(columns, dtype))
    assert module.source.count("sqrtf(" if dtype != torch.float64 else "sqrt(") == 1
    assert re.search(r" c\d+\[\d+\];", module.source)


def test_channels_innermost() -> None:
    x = torch.randn(2, 33, 9, 7).to(memory_format=torch.channels_last)
    module = compiled(normalised, x, *of_columns(33, torch.float32))
    assert module.source.count("sqrtf(") == 1 and re.search(r" c\d+\[\d+\];", module.source)


def test_few_rows_and_rows_in_tiles_are_computed_as_they_come() -> None:
    for rows, columns in ((MIN_ROWS - 1, 40), (20, 5000)):
        x, others = torch.randn(rows, columns), of_columns(columns, torch.float32)
        assert not re.search(r" c\d+\[\d+\];", compiled(normalised, x, *others).source)


def test_rows_that_are_reduced_read_it_in_each_pass() -> None:
    def program(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale.exp()).softmax(-1) * scale.exp().sqrt()

    module = compiled(program, torch.randn(30, 600), torch.randn(600))
    assert len(re.findall(r" c\d+\[600\];", module.source)) == 2


def test_what_is_summed_over_all_rows_reads_it_too() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        rows = x * weight.exp()
        return (rows - rows.mean(-1, keepdim=True)).relu()

    x, weight = torch.randn(50, 300), torch.randn(300, requires_grad=True)
    ours, eagers = fxkit.compile(program), program
    found, expected = (
        torch.autograd.grad(fn(x, weight).square().sum(), weight)[0] for fn in (ours, eagers)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_that_all_rows_have_in_common_are_written(dtype: torch.dtype) -> None:
    def alone(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.exp(), y.tanh()])

    def read_again(x: Tensor, y: Tensor) -> Tensor:
        common = x.exp()
        return torch.cat([common, y.tanh() * common])

    x, y = torch.randn(1, 64).to(dtype).expand(67, 64), torch.randn(67, 64).to(dtype)
    for program in (alone, read_again):
        found = fxkit.compile(program)(x, y)
        torch.testing.assert_close(found, program(x, y), rtol=2e-2, atol=1e-6)
