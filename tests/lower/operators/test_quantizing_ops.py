"""Fake quantisation in kernels: eager's bits, its errors, and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, fx

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.training.training_module import TrainingModule
from fxkit.torch_adapters.quantized_operators import quantized_operators
from tests.sampling import one_in

SPECIAL = [math.nan, math.inf, -math.inf, 1e20, -1e20, 2e10, 0.05, 0.15, 0.25, -0.05, 1e-45, -0.0]


def numbers(*shape: int) -> Tensor:
    x = torch.randn(shape) * 5
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return x


def same(found: Tensor, expected: Tensor) -> bool:
    is_equal = (found == expected) | (found.isnan() & expected.isnan())
    return found.dtype == expected.dtype and bool(is_equal.all())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scale", [0.1, 0.013, 3, 1e-30, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_has_the_levels_of_eager(dtype: torch.dtype, scale: float) -> None:
    def program(x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, scale, 5, 0, 255)

    x = numbers(7, 61).to(dtype)
    module = to_cpp(fx.symbolic_trace(program), (x,))
    assert all(region.kernel for region in module.regions)
    assert same(module(x), program(x))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_channels_have_the_levels_of_eager(axis: int) -> None:
    def program(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return torch.fake_quantize_per_channel_affine(x, scale, zero, axis, -128, 127)

    x = numbers(6, 17, 6)
    count = x.shape[axis]
    scale, zero = torch.rand(count) + 0.01, torch.randint(-100, 100, (count,)).int()
    module = to_cpp(fx.symbolic_trace(program), (x, scale, zero))
    assert all(region.kernel for region in module.regions)
    assert same(module(x, scale, zero), program(x, scale, zero))
    zero[1] = 500
    with pytest.raises(RuntimeError, match="must be between"):
        module(x, scale, zero)


def test_what_eager_computes_otherwise_is_left_to_it() -> None:
    def program(x: Tensor, scale: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, 0, 255)

    zero, x, scale = torch.tensor(5, dtype=torch.int32), numbers(50), torch.tensor(0.1)
    module = to_cpp(fxkit.capture(program, (x, scale)).graph_module, (x, scale))
    assert "computed at run time" in str(module.reasons)
    assert same(module(x, scale), program(x, scale))
    wide = to_cpp(
        fx.symbolic_trace(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 5, 0, 255)),
        (x.double(),),
    )
    assert "other steps" in str(wide.reasons)


def test_gradients_pass_where_nothing_was_clamped() -> None:
    def program(x: Tensor) -> Tensor:
        return (torch.fake_quantize_per_tensor_affine(x * 3, 0.1, 5, 0, 31) ** 2).sum()

    fast, x = fxkit.compile(program), torch.randn(64, 70, requires_grad=True)
    for _ in range(2):
        (found,) = torch.autograd.grad(fast(x), x)
    (expected,) = torch.autograd.grad(program(x), x)
    torch.testing.assert_close(found, expected)
    (module,) = fast.compiled_modules
    assert isinstance(module, TrainingModule) and module.reason is None
    assert not module.reasons


@pytest.mark.parametrize("axis", [0, 1])
def test_channels_in_training(axis: int) -> None:
    def program(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return torch.fake_quantize_per_channel_affine(x * 3, scale, zero, axis, -8, 7) * 2

    fast, x = fxkit.compile(program), numbers(200, 300).requires_grad_()
    count = x.shape[axis]
    scale, zero = torch.rand(count) + 0.01, torch.randint(-8, 8, (count,)).int()
    for _ in range(2):
        found = fast(x, scale, zero)
        (gradient,) = torch.autograd.grad(found, x, torch.ones_like(found))
    expected = program(x, scale, zero)
    assert same(found, expected)
    assert same(gradient, torch.autograd.grad(expected, x, torch.ones_like(found))[0])
    module = next(m for m in fast.compiled_modules if isinstance(m, TrainingModule))
    assert any(region.kernel for region in module.regions)
    zero[1] = 500
    with pytest.raises(RuntimeError, match="must be between"):
        fast(x, scale, zero)


RANGES = [
    (0, 255, torch.uint8),
    (-128, 127, torch.int8),
    (-127, 127, torch.int8),
    (-8, 7, torch.int8),
]


@pytest.mark.parametrize(
    ("scale", "dtype", "bounded"),
    one_in(4, [0.1, 0.013, 3.0, 1e-9], [torch.float32, torch.bfloat16, torch.float16], RANGES),
)
def test_integers_are_eagers_and_so_are_the_numbers_that_they_stand_for(
    scale: float, dtype: torch.dtype, bounded: tuple[int, int, torch.dtype]
) -> None:
    low, high, kind = bounded
    ops = quantized_operators()

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        level = ops.quantize_per_tensor.default(x * 1, scale, 3, low, high, kind)
        bounds = (scale, 3, low, high, kind)
        return level, ops.dequantize_per_tensor.default(level, *bounds, out_dtype=dtype)

    x = numbers(7, 61).to(dtype)
    module = to_cpp(fx.symbolic_trace(program), (x,))
    assert all(region.kernel for region in module.regions)
    for found, expected in zip(module(x), program(x), strict=True):
        assert same(found, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_channels_are_dequantised_as_in_eager(axis: int, has_zeros: bool) -> None:
    ops, count = quantized_operators(), (6, 17, 5)[axis]

    def program(x: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        bounds = (axis, -128, 127, torch.int8)
        known = zeros if has_zeros else None
        return ops.dequantize_per_channel.default(x, scales, known, *bounds).neg()

    x = torch.randint(-128, 128, (6, 17, 5)).to(torch.int8)
    args = (x, torch.rand(count), torch.randint(-100, 100, (count,)))
    module = to_cpp(fx.symbolic_trace(program), args)
    assert all(region.kernel for region in module.regions)
    assert same(module(*args), program(*args))
