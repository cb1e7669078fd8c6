"""What a program has set as defaults is not what kernels are made with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit


def attended(x: Tensor) -> Tensor:
    heads = x.view(2, 32, 4, 32).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads) * 2


def convolved(x: Tensor) -> Tensor:
    weight = x.view(-1)[:576].view(8, 8, 3, 3)
    return F.relu(F.conv2d(x.view(1, 8, 32, 32), weight))


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: torch.relu(x * 3 + 0.1),
    "sum": lambda x: x.softmax(-1).sum(0),
    "product": lambda x: torch.relu(x @ x.t()),
    "attention": attended,
    "resized": lambda x: F.interpolate(x.view(1, 1, 64, 128), size=(37, 50)) + 1,
    "convolution": convolved,
    "new": lambda x: x + torch.zeros_like(x) + x.new_ones(128),
    "bounded": lambda x: x.clamp(-0.3, 0.7) / 3,
}


@pytest.fixture(params=["meta", "float64", "bfloat16"])
def default(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set a default device or dtype."""
    if request.param == "meta":
        torch.set_default_device("meta")
        yield request.param
        torch.set_default_device(None)
    else:
        torch.set_default_dtype(getattr(torch, request.param))
        yield request.param
        torch.set_default_dtype(torch.float32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_defaults_change_nothing(default: str, name: str) -> None:
    program = PROGRAMS[name]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(64, 128, generator=generator, device="cpu", dtype=torch.float32)
    compiled = fxkit.compile(program)
    for _ in range(3):
        found, expected = compiled(x), program(x)
        assert (found.dtype, found.device) == (expected.dtype, expected.device)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert all(module.report().calls for module in compiled.compiled_modules)


def test_gradients_with_another_default_device() -> None:
    x = torch.randn(64, 128, requires_grad=True)
    compiled = fxkit.compile(lambda x: (x.sin() * x.exp()).sum(-1))
    expected = (x.cos() * x.exp() + x.sin() * x.exp()).detach()
    torch.set_default_device("meta")
    try:
        (found,) = torch.autograd.grad(compiled(x).sum(), x)
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, expected)


def test_what_a_program_makes_is_of_its_default_device_and_dtype() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.ones(3) + 1

    compiled, x = fxkit.compile(program), torch.randn(64, 128)
    assert compiled(x)[1].device.type == "cpu"
    torch.set_default_device("meta")
    try:
        twice, made = compiled(x)
        assert (twice.device.type, made.device.type) == ("cpu", "meta")
    finally:
        torch.set_default_device(None)
    assert compiled(x)[1].device.type == "cpu"
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled(x)[1].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert compiled(x)[1].dtype == torch.float32
