"""Patterns with conversions to float32, in graphs that have them and in those that lack them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fxkit
from fxkit.authoring.kernels.conversions import by_dtypes
from tests.architectures import HUGGING_FACE


def to_float32(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (wide * scale).to(torch.float32)


def to_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (wide * scale).to(torch.bfloat16)


def to_its_dtype(x: Tensor, w: Tensor) -> Tensor:
    dtype = x.dtype
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (wide * scale).to(dtype)


def kernel_of(pattern: Callable[..., Tensor]) -> fxkit.Kernel:
    return fxkit.kernel(
        pattern,
        call=lambda x, w: pattern(x, w),
        where=lambda match: match.type("w").shape == match.type("x").shape[-1:],
        samples=[{"x": (2, 5, 16), "w": (16,)}],
        always=True,
    )


def uses(program: fxkit.Compiled, pattern: Callable[..., Tensor]) -> int:
    return program.report().count(f"kernel {pattern.__name__} used at")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [
        (torch.float32, to_float32),
        (torch.float32, to_its_dtype),
        (torch.bfloat16, to_bfloat16),
        (torch.bfloat16, to_its_dtype),
    ],
)
def test_all_norms_of_llama_are_found(dtype: torch.dtype, pattern: Callable[..., Tensor]) -> None:
    model, inputs = HUGGING_FACE["llama"]()
    model, given = model.to(dtype), inputs(2)
    program = fxkit.compile(model, kernels=[kernel_of(pattern)])
    with torch.no_grad():
        expected = model(**given).logits
        exact = copy.deepcopy(model).double()(**given).logits
        bound = 2 * (expected - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        for _ in range(2):
            assert (program(**given).logits - exact).abs().max() <= bound
    norms = sum("Norm" in type(module).__name__ for module in model.modules())
    assert uses(program, pattern) == norms > 2


def plain(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("pattern", "dtype", "is_found"),
    [
        (to_float32, torch.float32, True),
        (to_its_dtype, torch.float32, True),
        (to_bfloat16, torch.float32, False),
        # What is not converted here would be by the pattern.
        (to_float32, torch.bfloat16, False),
        (to_bfloat16, torch.bfloat16, False),
        (to_its_dtype, torch.bfloat16, False),
        (to_float32, torch.float64, False),
        (to_its_dtype, torch.float64, False),
    ],
)
def test_a_graph_without_conversions(
    pattern: Callable[..., Tensor], dtype: torch.dtype, is_found: bool
) -> None:
    program = fxkit.compile(plain, kernels=[kernel_of(pattern)])
    x, w = torch.randn(3, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(program(x, w), plain(x, w))
    assert bool(uses(program, pattern)) == is_found


def test_a_pattern_is_held_to_the_dtype_of_each_operand() -> None:
    def gate(x: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(x.float()) * y).to(y.dtype)

    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(x) * y

    kernel = fxkit.kernel(
        gate, call=lambda x, y: gate(x, y), samples=[{"x": (3, 4), "y": (3, 4)}], always=True
    )
    for x_dtype, y_dtype, is_found in (
        (torch.float32, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),
    ):
        compiled = fxkit.compile(program, kernels=[kernel])
        x, y = torch.randn(5, 8, dtype=x_dtype), torch.randn(5, 8, dtype=y_dtype)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, y), program(x, y))
        assert bool(uses(compiled, gate)) == is_found


def test_patterns_without_conversions_have_one_form() -> None:
    assert len(by_dtypes(kernel_of(plain).rule, drops_conversions=True)) == 1
    assert len(by_dtypes(kernel_of(to_float32).rule, drops_conversions=False)) == 1
    assert len(by_dtypes(kernel_of(to_float32).rule, drops_conversions=True)) == 4
