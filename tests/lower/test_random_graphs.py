"""Random programs, with every kind of operator that kernels compute, against eager."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxkit
from fxkit.lower import to_cpp
from tests.lower.kernels import ALWAYS
from tests.lower.program_checks import compare_calls, compare_sizes, hold, run
from tests.lower.random_programs import Program, random_program, results_of, together

SWEEP = 5000
PARTS = 50
AT_ONCE = 10  # programs of one build
CALLED_AGAIN = 500
SIZES = 300
LARGE = 32  # some results are then so large that their memory is kept for later calls

# Deviations of single elements.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")


@settings(
    max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.randoms(use_true_random=False))
def test_kernels_agree_with_eager(random: Random) -> None:
    compare_together([random_program(random) for _ in range(5)])


@pytest.mark.parametrize("seed", range(2))
def test_compiled_programs_are_called_again(seed: int) -> None:
    _call_again(seed, 1 if seed else LARGE)


def test_programs_that_serve_other_sizes() -> None:
    assert sum(map(_call_with_sizes, range(2))) >= 3


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs_agree_with_eager(part: int) -> None:
    share = SWEEP // PARTS
    for first in range(part * share, (part + 1) * share, AT_ONCE):
        seeds = range(first, first + AT_ONCE)
        compare_together([random_program(Random(seed)) for seed in seeds])


def compare_together(programs: list[Program]) -> None:
    """Compile programs as one, and hold each to eager."""
    gm, inputs = together(programs)
    with torch.no_grad():
        found, after = run(to_cpp(gm, inputs, policy=ALWAYS), inputs)
        for gm, own in programs:
            count = len(results_of(gm))
            hold(found[:count], after[: len(own)], gm, own)
            found, after = found[count:], after[len(own) :]


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_many_compiled_programs_are_called_again(part: int) -> None:
    for seed in range(part, CALLED_AGAIN, PARTS):
        _call_again(seed, 1 if seed % 5 else LARGE)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs_that_serve_other_sizes(part: int) -> None:
    for seed in range(part, SIZES, PARTS):
        _call_with_sizes(seed)


def _call_again(seed: int, factor: int) -> None:
    gm, inputs = random_program(Random(seed), factor)
    with torch.no_grad():
        compare_calls(fxkit.compile(gm), gm, inputs)


def _call_with_sizes(seed: int) -> int:
    gm, inputs = random_program(Random(seed))
    with torch.no_grad():
        return compare_sizes(fxkit.compile(gm, dynamic=True), gm, inputs)
