"""Authored operators differentiated forwards, and within transforms of functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import forward_ad

import fxkit

# torch imports rules of its own for tangents, by what it calls deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@fxkit.operator(namespace="forward_mode")
def folded(x, y, k=2.0):
    """Two results with branches, the second constant on one of them."""
    if x > y:
        return x**3 * y, x * k
    return math.sin(x * y), 1.0


@fxkit.operator(namespace="forward_mode", gradient=lambda grad, x: grad, check_gradient=False)
def stepped(x):
    return round(x)


@fxkit.row_operator(namespace="forward_mode")
def scaled(row, weight, shift: float):
    mean = sum(x * x for x in row) / len(row)
    return [x * w / math.sqrt(mean + 0.1) + shift for x, w in zip(row, weight, strict=True)], mean


def folded_by_torch(x, y, k=2.0):
    one = torch.ones_like(x * y)
    return (
        torch.where(x > y, x**3 * y, torch.sin(x * y)),
        torch.where(x > y, x * k * one, one),
    )


def scaled_by_torch(x, weight, shift):
    mean = x.square().mean(-1)
    return x * weight / (mean + 0.1).sqrt()[..., None] + shift[..., None], mean


def folded_case():
    return folded, folded_by_torch, [torch.randn(4, 3), torch.randn(3)]


def scaled_case():
    return scaled, scaled_by_torch, [torch.randn(4, 3), torch.randn(3), torch.randn(4)]


cases = pytest.mark.parametrize("case", [folded_case, scaled_case])


@cases
def test_tangents_are_those_of_torch(case) -> None:
    ours, theirs, operands = case()
    ours(*operands)  # what is remembered of calls serves none that has tangents
    tangents = [torch.randn_like(x) for x in operands]
    for moving in range(1, 1 << len(operands)):
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(x, t) if moving >> i & 1 else x
                for i, (x, t) in enumerate(zip(operands, tangents, strict=True))
            ]
            for one, other in zip(ours(*duals), theirs(*duals), strict=True):
                found, expected = (forward_ad.unpack_dual(r).tangent for r in (one, other))
                expected = torch.zeros_like(other) if expected is None else expected
                found = torch.zeros_like(one) if found is None else found
                torch.testing.assert_close(found, expected)


@cases
def test_differences_in_both_directions(case) -> None:
    ours, _, operands = case()
    operands = [x.double().requires_grad_() for x in operands]
    torch.autograd.gradcheck(ours, operands, check_forward_ad=True)
    torch.autograd.gradgradcheck(ours, operands, check_fwd_over_rev=True, check_rev_over_rev=True)


@cases
@pytest.mark.parametrize("outer", [torch.func.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("inner", [torch.func.jacfwd, torch.func.jacrev])
def test_transforms_nest(case, outer, inner) -> None:
    ours, theirs, operands = case()
    found, expected = (
        outer(inner(lambda x, f=f: sum(r.sum() for r in f(x, *operands[1:]))))(operands[0])
        for f in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@fxkit.operator(namespace="forward_mode")
def rooted(x):
    return math.sqrt(x) if x > 0 else x * 2


@pytest.mark.parametrize(
    "slopes",
    [
        lambda x: torch.func.grad(lambda x: rooted(x).sum())(x),
        lambda x: torch.func.jacrev(rooted)(x).sum(0),
        lambda x: torch.func.jacfwd(rooted)(x).sum(0),
        torch.vmap(torch.func.grad(rooted)),
        lambda x: torch.func.vjp(rooted, x)[1](torch.ones_like(x))[0],
        lambda x: torch.func.jvp(rooted, (x,), (torch.ones_like(x),))[1],
        fxkit.compile(lambda x: torch.func.grad(lambda x: rooted(x).sum())(x)),
    ],
)
def test_a_path_that_is_not_taken_adds_no_nan(slopes) -> None:
    x = torch.tensor([-1.0, 4.0, -2.0, 0.0])
    assert torch.equal(slopes(x), torch.tensor([2.0, 0.25, 2.0, 2.0]))
    hessian = torch.func.hessian(lambda x: rooted(x).sum())(x)
    torch.testing.assert_close(hessian.diagonal(), torch.tensor([0.0, -1 / 32, 0.0, 0.0]))


def test_gradients_of_many_examples() -> None:
    operands = torch.randn(5, 3), torch.randn(5, 3)
    found, expected = (
        torch.vmap(torch.func.grad(lambda x, y, f=f: f(x, y)[0].sum(), argnums=(0, 1)))(*operands)
        for f in (folded, folded_by_torch)
    )
    torch.testing.assert_close(found, expected)


def test_an_operand_without_a_tangent_adds_no_nan() -> None:
    @fxkit.operator
    def raised(x, y):
        return x**y

    x = torch.tensor([-2.0, 0.0, 3.0])
    found = torch.func.jvp(lambda x: raised(x, torch.tensor(2.0)), (x,), (torch.ones(3),))[1]
    torch.testing.assert_close(found, 2 * x)


def test_a_gradient_of_ones_own_is_that_of_tangents_too() -> None:
    x, tangent = torch.randn(5), torch.randn(5)
    found = torch.func.jvp(stepped, (x,), (tangent,))
    assert torch.equal(found[0], x.round()) and torch.equal(found[1], tangent)
    assert torch.equal(torch.func.vjp(stepped, x)[1](tangent)[0], tangent)
