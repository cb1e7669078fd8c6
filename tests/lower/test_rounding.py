"""`fast=True`: results of 16 bits stay float32 within a kernel, and are rounded when stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower import CompiledModule
from fxkit.lower.training import training_module

HALVES = [torch.bfloat16, torch.float16]

Program = Callable[[Tensor, Tensor], Tensor]


def chain(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * 1.7 + y) * torch.sigmoid(y) - x / 3


def normed(x: Tensor, y: Tensor) -> Tensor:
    return F.softmax(F.layer_norm(x * y + x, x.shape[-1:]) * 2, -1) * 100


def joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x * 1.1 + y, (y - x) * 0.3], -1).relu() * 1.3


PROGRAMS = [chain, normed, joined]


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, *shape, generator=generator).to(dtype)
    return x, y


def compiled_for(program: Program, *args: Tensor, **options: bool) -> fxkit.Compiled:
    """Return a program whose next call runs its kernels: the first one ran in eager."""
    compiled = fxkit.compile(program, **options)
    compiled(*args)
    return compiled


def kernels_of(compiled: fxkit.Compiled) -> list[str]:
    (module,) = compiled.compiled_modules
    assert isinstance(module, CompiledModule)
    return [region.kernel for region in module.regions if region.kernel is not None]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm())


@pytest.mark.one_in(2)
@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_fewer_roundings_are_nearer_to_float64(program: Program, dtype: torch.dtype) -> None:
    args = inputs(dtype, 33, 129)
    exact = program(*(a.double() for a in args))
    fast = compiled_for(program, *args, fast=True)
    careful = compiled_for(program, *args)
    eager = distance(program(*args), exact)
    assert fast(*args).dtype == dtype
    assert distance(fast(*args), exact) < 0.8 * eager
    assert distance(careful(*args), exact) >= 0.8 * eager
    assert kernels_of(fast)


@torch.no_grad()
def test_what_is_not_16_bits_wide_stays_as_it_was() -> None:
    args = inputs(torch.float32, 65, 31)
    fast = compiled_for(chain, *args, fast=True)
    assert torch.equal(fast(*args), compiled_for(chain, *args)(*args))


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_conversion_that_was_asked_for_takes_place(dtype: torch.dtype) -> None:
    x, _ = inputs(torch.float32, 8, 64)

    def to_and_fro(x: Tensor) -> Tensor:
        return (x * 3).to(dtype).float() - x * 3

    compiled = compiled_for(to_and_fro, x, fast=True)
    assert torch.equal(compiled(x), to_and_fro(x))
    assert compiled(x).any() and kernels_of(compiled)


@torch.no_grad()
def test_a_stored_result_is_rounded_to_the_nearest() -> None:
    args = inputs(torch.bfloat16, 8, 64)
    x, y = (a.float() for a in args)
    compiled = compiled_for(lambda x, y: x * y + x, *args, fast=True)
    assert torch.equal(compiled(*args), (x * y + x).bfloat16())


@torch.no_grad()
def test_what_overflows_only_in_between_stays_finite() -> None:
    x = torch.full((4, 64), 300.0, dtype=torch.float16)

    def root_of_product(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sqrt()

    assert compiled_for(root_of_product, x, x)(x, x).isinf().all()
    assert torch.equal(compiled_for(root_of_product, x, x, fast=True)(x, x), x)


@torch.no_grad()
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_is_too_small_for_a_half_is_added(sign: int) -> None:
    x = torch.zeros(4, 64, dtype=torch.float16)

    def logarithm(x: Tensor) -> Tensor:
        return (x + 1e-9 if sign > 0 else x - -1e-9).log()

    assert compiled_for(logarithm, x)(x).isinf().all()
    fast = compiled_for(logarithm, x, fast=True)(x)
    torch.testing.assert_close(fast, logarithm(x.double()).half())


@torch.no_grad()
def test_nan_infinity_and_empty_tensors() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-39] * 7).bfloat16()
    compiled = compiled_for(lambda x: torch.relu(x * 2) - x, x, fast=True)
    torch.testing.assert_close(compiled(x), torch.relu(x * 2) - x, equal_nan=True)
    assert compiled(x[:0]).shape == compiled(x[:0]).shape == (0,)


@torch.no_grad()
def test_timed_kernels_stay_unrounded() -> None:
    args = inputs(torch.bfloat16, 64, 512)
    tuned = compiled_for(chain, *args, fast=True, tune=True)
    if kernels_of(tuned):  # timing may have chosen eager
        assert torch.equal(tuned(*args), compiled_for(chain, *args, fast=True)(*args))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "CALL_SECONDS", -1.0)  # every kernel pays

    def gradients(program: Program, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in args]
        return torch.autograd.grad(program(*leaves).float().square().sum(), leaves)

    args = inputs(dtype, 64, 300)
    exact = gradients(chain, tuple(a.double() for a in args))
    eager = gradients(chain, args)
    compiled = fxkit.compile(chain, train=True, fast=True)
    gradients(compiled, args)
    found = gradients(compiled, args)
    for ours, plain, true in zip(found, eager, exact, strict=True):
        assert ours.dtype == dtype
        assert distance(ours, true) <= 1.01 * distance(plain, true.double())


def test_option_of_dynamo() -> None:
    args = inputs(torch.bfloat16, 33, 129)
    with torch.no_grad():
        through = torch.compile(chain, backend="fxkit", options={"fast": True})
        through(*args)
        through(*args)
        assert torch.equal(through(*args), compiled_for(chain, *args, fast=True)(*args))
