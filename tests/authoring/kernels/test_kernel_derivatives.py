"""Derivatives of kernels in forward mode, and within transforms of functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fxkit
from fxkit.authoring.kernels import AuthoredKernel

# torch imports rules of its own for tangents, by what it calls deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

SOURCE = """
#include <cmath>
#include <cstdint>
template <class T>
void wave(const T* x, const T* y, double k, T* sines, T* squares, int64_t x_numel) {
  for (int64_t i = 0; i < x_numel; ++i) {
    sines[i] = std::sin(x[i] * y[i]) * (T)k;
    squares[i] = x[i] * x[i];
  }
}
"""


def wave(x: Tensor, y: Tensor, k: float) -> tuple[Tensor, Tensor]:
    return torch.sin(x * y) * k, x * x


def wave_gradient(sine: Tensor, square: Tensor, x: Tensor, y: Tensor, k: float) -> Any:
    slope = sine * torch.cos(x * y) * k
    return slope * y + 2 * square * x, slope * x


def are_alike(match: fxkit.patterns.match_results.Match) -> bool:
    return match.type("x").shape == match.type("y").shape


def by_source(**options: Any) -> AuthoredKernel:
    return fxkit.kernel(wave, cpp=SOURCE, where=are_alike, always=True, **options)


def by_function(**options: Any) -> AuthoredKernel:
    def called(x: Tensor, y: Tensor, k: float) -> tuple[Tensor, Tensor]:
        return wave(x.detach(), y.detach(), k)  # what a launched kernel would return

    return fxkit.kernel(wave, call=called, where=are_alike, always=True, **options)


GIVEN = {"with a gradient": {"gradient": wave_gradient}, "without one": {}}

kinds = pytest.mark.parametrize("make", [by_source, by_function])
gradients = pytest.mark.parametrize("given", GIVEN)


def summed(function: Any) -> Any:
    return lambda x, y: sum(r.sum() for r in function(x, y, 0.5))


@kinds
@gradients
def test_tangents_are_those_of_the_pattern(make: Any, given: str) -> None:
    kernel = make(**GIVEN[given])
    operands = [torch.randn(4, 3, dtype=torch.float64) for _ in range(2)]
    tangents = [torch.randn_like(x) for x in operands]
    for called in (kernel, kernel.operator):
        for moving in range(1, 4):
            with forward_ad.dual_level():
                duals = [
                    forward_ad.make_dual(x, t) if moving >> i & 1 else x
                    for i, (x, t) in enumerate(zip(operands, tangents, strict=True))
                ]
                pairs = zip(called(*duals, 0.5), wave(*duals, 0.5), strict=True)
                for one, other in pairs:
                    found, expected = (forward_ad.unpack_dual(r).tangent for r in (one, other))
                    assert (found is None) == (expected is None)
                    if found is not None:
                        torch.testing.assert_close(found, expected)


@pytest.mark.one_in(2)
@kinds
@gradients
@pytest.mark.parametrize("transform", [
    lambda f: torch.func.grad(f, argnums=(0, 1)),
    lambda f: torch.func.jacfwd(f),
    lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    lambda f: torch.func.jacfwd(torch.func.jacrev(f)),
    lambda f: torch.func.jacrev(torch.func.jacfwd(f)),
    lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1))),
    lambda f: lambda x, y: torch.func.jvp(f, (x, y), (y, x)),
    lambda f: lambda x, y: torch.func.vjp(f, x, y)[1](x.sum()),
], ids=["grad", "jacfwd", "jacfwd of jacfwd", "jacfwd of jacrev", "jacrev of jacfwd",
        "vmap of grad", "jvp", "vjp"])  # fmt: skip
def test_transforms_are_those_of_the_pattern(make: Any, given: str, transform: Any) -> None:
    kernel = make(**GIVEN[given])
    x, y = torch.randn(2, 3, 2, dtype=torch.float64)
    expected = transform(summed(wave))(x, y)
    for called in (kernel, kernel.operator):
        torch.testing.assert_close(transform(summed(called))(x, y), expected)


@kinds
@gradients
def test_gradients_of_the_operator_itself(make: Any, given: str) -> None:
    operator = make(**GIVEN[given]).operator
    operands = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda x, y: operator(x, y, 0.5), operands)
    assert torch.autograd.gradcheck(
        lambda x, y: operator(x, y, 0.5), operands, check_forward_ad=True, check_batched_grad=False
    )


@pytest.mark.one_in(2)
@kinds
@gradients
def test_a_compiled_program_keeps_tangents(make: Any, given: str) -> None:
    kernel = make(**GIVEN[given])
    program = fxkit.compile(lambda x, y: wave(x + 1, y, 0.5)[0] * 2, kernels=[kernel])
    x, y = torch.randn(2, 5, 3, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(2):
            program(x, y)
    assert "kernel wave used" in program.report()
    found = torch.func.jvp(program, (x, y), (y, x))
    torch.testing.assert_close(
        found, torch.func.jvp(lambda x, y: wave(x + 1, y, 0.5)[0] * 2, (x, y), (y, x))
    )
