"""Random programs that are built at one size and run at others, against eager."""

from __future__ import annotations

from random import Random

import pytest
import torch

import fxkit
from tests.lower.programs_by_sizes import Program, random_program
from tests.sampling import one_in

# So far apart that no dimension of a program happens to be as long as another one.
SIZES = [(5, 23), (7, 31), (11, 43), (17, 61), (47, 13), (71, 29), (13, 67), (53, 19), (97, 23)]
ODD = [(1, 7), (7, 1), (1, 1), (0, 5), (5, 0), (2, 64), (64, 64), (1, 9)]
SWEEP = 300

# Sizes of nought and one are captured apart, which is more often than is usual.
pytestmark = pytest.mark.filterwarnings("ignore::fxkit.tracing.recaptures.RecaptureWarning")


def compare(compiled: object, program: Program, sizes: tuple[int, int]) -> None:
    """Hold a call to eager's: the results, or that it raises."""
    inputs = program.inputs(*sizes)
    try:
        expected = program(*inputs)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            compiled(*inputs)  # type: ignore[operator]
        return
    for a, b in zip(compiled(*inputs), expected, strict=True):  # type: ignore[operator]
        scale = float(b.abs().max()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=3e-4, atol=3e-4 * max(1.0, scale), equal_nan=True)


def check(seed: int) -> None:
    torch.manual_seed(seed)
    program = random_program(Random(seed))
    compiled = fxkit.compile(program, dynamic=True)
    with torch.no_grad():
        for sizes in SIZES[:2]:
            compare(compiled, program, sizes)
        builds, graphs = compiled.builds, len(compiled.captured.graphs)
        for sizes in SIZES[2:]:
            compare(compiled, program, sizes)
        # A program may leave a step out where a tensor is large: that is another graph.
        is_one_way = len(compiled.captured.graphs) == graphs
        assert compiled.builds == builds or not is_one_way
        for sizes in ODD:
            compare(compiled, program, sizes)


@pytest.mark.parametrize("seed", one_in(4, range(1000, 1008)))
def test_one_build_serves_all_sizes(seed: int) -> None:
    check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
def test_one_build_serves_all_sizes_of_many_programs(part: int) -> None:
    for seed in range(part, SWEEP, 10):
        check(seed)
