"""Losses that raise for some numbers: eager's values, eager's errors, eager's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower import Policy, to_cpp

REDUCTIONS = ("none", "mean", "sum")
ENDS = [0.0, 1.0, -0.0, 1e-45, 1e-38, 0.5, 1 - 2**-24, 1e-20]


def shares(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers from 0 to 1, both ends among them."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[: len(ENDS)] = torch.tensor(ENDS)
    return x


def compiled(program: Any, *args: Tensor) -> Any:
    """Compile a program, all of which becomes kernels."""
    gm = fxkit.capture(program, args).graph_module
    module = to_cpp(gm, args, policy=Policy(min_members=1))
    assert all(region.kernel for region in module.regions), module.reasons
    return module


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_entropy_of_shares(reduction: str, weighs: bool, dtype: torch.dtype) -> None:
    x, target = shares(17, 33).to(dtype), shares(17, 33, seed=1).flip(1).to(dtype)
    weight = torch.randn(33).to(dtype) if weighs else None

    def program(x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, target, weight, reduction=reduction)

    module = compiled(program, x, target)
    expected = program(x, target)
    torch.testing.assert_close(module(x, target), expected)
    turned = [t.t().contiguous().t() for t in (x, target)]
    torch.testing.assert_close(compiled(program, *turned)(*turned), program(*turned))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "bad", [1.5, -1e-45, float("nan"), float("inf"), -float("inf"), 1 + 2**-23]
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_is_no_share_raises_as_in_eager(bad: float, reduction: str) -> None:
    def program(x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(x * 1, target, reduction=reduction)

    x, target = shares(600), shares(600, seed=1)
    module = compiled(program, x, target)
    x[333] = bad
    with pytest.raises(RuntimeError, match="input should be between 0 and 1"):
        program(x, target)
    with pytest.raises(RuntimeError, match="input should be between 0 and 1"):
        module(x, target)


@pytest.mark.parametrize("bad", [1.5, -0.5, float("nan")])
def test_a_target_that_is_no_share_is_eagers(bad: float) -> None:
    def program(x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, target)

    def outcome(call: Any) -> Any:
        try:
            return call(x, target).nan_to_num(7.0)
        except RuntimeError as error:
            return str(error)

    x, target = shares(600), shares(600, seed=1)
    module = compiled(program, x, target)
    target[500] = bad
    assert outcome(module) == outcome(program)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_and_errors_in_training(reduction: str) -> None:
    def program(x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(torch.sigmoid(x) * 1, target, reduction=reduction).sum()

    def clamped(x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(x * 1, target, reduction=reduction).sum()

    x, target = torch.randn(300, 200) * 4, shares(300, 200)
    for run, at in ((program, x), (clamped, shares(300, 200, seed=2))):
        fast = fxkit.compile(run)
        for _ in range(2):
            given = at.clone().requires_grad_()
            (found,) = torch.autograd.grad(fast(given, target), given)
            (expected,) = torch.autograd.grad(run(given, target), given)
            torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        fast((x + 5).requires_grad_(), target)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(6, 6), (6, 1), (6,), (1, 6)])
def test_variances_of_elements_rows_and_columns(shape: tuple[int, ...], reduction: str) -> None:
    def program(x: Tensor, target: Tensor, var: Tensor) -> Tensor:
        return F.gaussian_nll_loss(x, target, var, full=True, reduction=reduction)

    x, target, var = torch.randn(6, 6), torch.randn(6, 6), torch.rand(shape) + 0.1
    var.view(-1)[0] = 0
    module = compiled(program, x, target, var)
    torch.testing.assert_close(module(x, target, var), program(x, target, var))
    var.view(-1)[1] = float("nan")
    torch.testing.assert_close(
        module(x, target, var), program(x, target, var), equal_nan=True
    )  # fmt: skip
    var.view(-1)[1] = -1e-45
    with pytest.raises(ValueError, match="negative"):
        module(x, target, var)


def test_a_check_of_what_is_read_in_part_covers_the_whole() -> None:
    def program(x: Tensor, target: Tensor) -> Tensor:
        loss = F.binary_cross_entropy(x, target, reduction="none")
        return torch.cat([loss[:3] * 2, target])

    x, target = shares(100), shares(100, seed=1)
    module = to_cpp(fxkit.capture(program, (x, target)).graph_module, (x, target))
    torch.testing.assert_close(module(x, target), program(x, target))
    x[90] = 2
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        module(x, target)
