"""Random programs of pointwise operators, reductions, views and moves, against eager."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxkit.lower import Policy, to_cpp
from tests.lower.random_programs import compare, random_program

SWEEP = 5000


@settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.randoms(use_true_random=False))
def test_kernels_agree_with_eager(random: Random) -> None:
    gm, inputs = random_program(random)
    compare(to_cpp(gm, inputs), gm, inputs)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
def test_many_programs_agree_with_eager(part: int) -> None:
    for seed in range(part, SWEEP, 10):
        gm, inputs = random_program(Random(seed))
        compare(to_cpp(gm, inputs, policy=Policy(min_members=1)), gm, inputs)
