"""Patterns of several results that share no parameter and no operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxkit
from fxkit.testing import prove

LN2 = 0.6931471805599453


@fxkit.rule(exact=False)
def two_powers(x, y):
    return (
        (torch.exp2(x), torch.log2(y)),
        (torch.exp(x * LN2), torch.log(y) / LN2),
    )


@fxkit.rule
def scaled(x, y):
    return (torch.sin(x), torch.cos(y)), (torch.sin(x) * 1.0, torch.cos(y) * 1.0)


def program(seed: int) -> Callable[..., Any]:
    """Return a random program over two matrices, with views and writes."""

    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        rng, values = random.Random(seed), [a, b]
        steps: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda x: torch.exp2(-x.abs()),
            lambda x: torch.log2(x.abs() + 1),
            lambda x: x + rng.choice(values),
            lambda x: x * 0.5,
            torch.tanh,
            lambda x: x.t().t(),
            lambda x: (x * 1.0).add_(0.25),
        ]
        for _ in range(rng.randint(2, 14)):
            values.append(rng.choice(steps)(rng.choice(values)))
        return tuple(values[-3:])

    return run


def check(seed: int) -> int:
    """Rewrite a program, compare it with itself before, and return the number of rewrites."""
    torch.manual_seed(seed)
    args = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    gm = fxkit.symbolic_trace(program(seed))
    report = fxkit.rewrite(gm, two_powers)
    for found, expected in zip(gm(*args), program(seed)(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    return report.count


def test_random_programs_keep_their_results() -> None:
    assert sum(map(check, range(40))) > 10


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_programs_keep_their_results(part: int) -> None:
    assert sum(map(check, range(100 * part, 100 * part + 100))) > 30


def test_what_a_rule_made_is_not_rewritten_again() -> None:
    gm = fxkit.symbolic_trace(lambda x, y: torch.sin(x) + torch.cos(y) * torch.sin(y))
    report = fxkit.rewrite(gm, scaled)
    assert report.count == 1
    x, y = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(gm(x, y), torch.sin(x) + torch.cos(y) * torch.sin(y))


def test_a_result_that_waits_for_the_other_is_no_place() -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.log2(torch.exp2(x) + 1))
    assert fxkit.rewrite(gm, two_powers).count == 0


def test_two_pairs_are_found() -> None:
    pairs = fxkit.rule(
        lambda x, y: (-x, x + 1, y + 2, y.exp()),
        lambda x, y: (x * 2, x - 1, y * 3, y - 2),
        exact=False,
    )
    gm = fxkit.symbolic_trace(lambda a, b: (-a, b.exp(), a + 1, b + 2))
    assert fxkit.rewrite(gm, pairs).count == 1
    a, b = torch.randn(3), torch.randn(3)
    assert all(map(torch.equal, gm(a, b), (a * 2, b - 2, a - 1, b * 3)))


def test_such_a_rule_can_be_proven() -> None:
    assert prove(two_powers)
