"""What a comparison of two programs makes of errors: by chance, or in every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxkit.analysis.equivalence import assert_equivalent, assert_same
from fxkit.analysis.observation import Observation
from fxkit.errors import NumericsError

EPS = torch.finfo(torch.float32).eps


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (6,))


def norm_by_hand(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def test_luck_of_one_call_is_no_difference() -> None:
    unlucky = 0
    for seed in range(100):
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        given = ((inputs,), dict[str, object]())
        observed = [Observation(program, given, True) for program in (norm, norm_by_hand)]
        truth = Observation(norm, given, True, run_wide=True)
        try:
            assert_same(observed[0], observed[1], truth)
        except NumericsError:
            unlucky += 1
        assert_equivalent(norm, norm_by_hand, (inputs,))
    assert 0 < unlucky < 50


@pytest.mark.parametrize("by", [3 * EPS, 1e-5])
def test_an_error_of_every_call_is_a_difference(by: float) -> None:
    with pytest.raises(NumericsError, match="error of at most twice"):
        assert_equivalent(torch.sin, lambda x: x.sin() * (1 + by), (torch.randn(8),))


def test_a_large_error_is_told_after_one_call() -> None:
    calls = []

    def wrong(x: Tensor) -> Tensor:
        calls.append(x)
        return x.sin() * 1.001

    with pytest.raises(NumericsError):
        assert_equivalent(torch.sin, wrong, (torch.randn(8),))
    assert len(calls) == 1


def test_the_first_of_several_differences_is_told() -> None:
    def wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * (1 + 3 * EPS), x > 1

    with pytest.raises(NumericsError, match=r"outputs\[0\] with an error"):
        assert_equivalent(lambda x: (x.sin(), x > 0), wrong, (torch.linspace(0.1, 2, 8),))


def test_a_program_that_takes_no_other_inputs_is_judged_by_one_call() -> None:
    def strict(x: Tensor) -> Tensor:
        if x.abs().max() > 1:
            raise ValueError("expected numbers of at most 1")
        return x.sin() * (1 + 3 * EPS)

    with pytest.raises(NumericsError):
        assert_equivalent(torch.sin, strict, (torch.ones(8),))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(1, 3).expand(4, 3),
        torch.tensor([0.0, torch.inf, torch.nan, -0.0]),
        torch.arange(5),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(0),
    ],
)
def test_inputs_of_any_kind_are_drawn_again(x: Tensor) -> None:
    with pytest.raises(NumericsError):
        assert_equivalent(
            lambda x: (x, torch.ones(1)), lambda x: (x, torch.ones(1) + 3 * EPS), (x,)
        )


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.exp()


@torch.library.custom_op("fxkit_test_equivalence::exp", mutates_args=())
def _exp(x: Tensor) -> Tensor:
    return x.exp()


@pytest.mark.parametrize("without", [_exp, _Forward.apply])
def test_programs_without_a_derivative_are_compared_by_their_results(without: Any) -> None:
    x = torch.randn(3).requires_grad_()
    assert_equivalent(without, without, (x,))
    with pytest.raises(NumericsError, match="outputs"):
        assert_equivalent(without, lambda x: without(x) + 1, (x,))
    with pytest.raises(NumericsError, match="gradient"):
        assert_equivalent(torch.exp, without, (x,))


def test_strides_of_empty_tensors_mean_nothing() -> None:
    x = torch.empty_strided((0, 4), (8, 2))
    assert_equivalent(lambda x: x * 1, lambda x: torch.empty((0, 4)), (x,))
    with pytest.raises(NumericsError, match="stride"):
        assert_equivalent(
            lambda x: x * 1, lambda x: (x * 1).t().contiguous().t(), (x.new_ones(2, 4),)
        )
