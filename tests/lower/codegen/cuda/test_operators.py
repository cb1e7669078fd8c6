"""The tables of operators, and random programs, as CUDA text against eager.

The text runs on the processor, and on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxkit
from tests.lower.codegen.cuda.on_cpu import ShimLowering
from tests.lower.codegen.cuda.on_gpu import OnGpu, lower_on_gpu
from tests.lower.kernels import compile_all, difference, fused_names
from tests.lower.operators import reduction_cases
from tests.lower.operators.reduction_cases import results, shortfall, wide
from tests.lower.operators.scalar_cases import (
    FLOATS,
    INTEGERS,
    LEFT_TO_EAGER,
    cases,
    eager,
    exact,
    function_of,
    named,
)
from tests.lower.program_checks import hold, run
from tests.lower.random_programs import Program, random_program, results_of, together

SWEEP = 500
AT_ONCE = 10  # programs of one build

# Deviations of single elements.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")


@dataclass(frozen=True)
class Place:
    """Where CUDA text runs.

    Attributes:
        lower: Compiles a graph for inputs on the processor.
        eager: Makes of a program one that eager runs at this place.
    """

    lower: Callable[..., Any]
    eager: Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture(scope="module", params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    if request.param == "gpu":
        return Place(lower_on_gpu, OnGpu)
    return Place(ShimLowering(tmp_path_factory.mktemp("cuda")), lambda program: program)


def hold_points_to_eager(place: Place, dtype: torch.dtype, part: slice, size: int) -> None:
    """Compile a part of the table of pointwise operators, and hold it to eager or float64."""
    rows = cases(dtype, (size,))[part]
    calls = [(function_of(r), (a[0],), named(r, a, k)) for r, a, k in rows]
    compiled, inputs, nodes = compile_all(calls, lowering=place.lower)
    fused = fused_names(compiled)
    wrong = []
    for (row, args, attributes), node, found in zip(rows, nodes, compiled(*inputs), strict=True):
        if node.name not in fused:
            if dtype in FLOATS and dtype not in LEFT_TO_EAGER.get(row.name, ()):
                wrong.append(f"{row.name}{attributes} is not fused")
            continue
        expected = eager(row, args, attributes)
        error = min(difference(found, expected), difference(found, exact(row, args, attributes)))
        if error > row.tolerance:
            wrong.append(f"{row.name}{attributes} is {error:.3g} eps off")
    assert not wrong, "\n".join(wrong)
    assert len(fused) > 0.8 * len(rows)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("dtype", "part"),
    [
        (torch.float32, slice(0, None, 4)),
        (torch.bfloat16, slice(1, None, 6)),
        (torch.int64, slice(0, None, 5)),
        (torch.uint8, slice(2, None, 7)),
    ],
    ids=str,
)
def test_a_part_of_the_pointwise_operators_equals_eager(
    place: Place, dtype: torch.dtype, part: slice
) -> None:
    hold_points_to_eager(place, dtype, part, 601)


@pytest.mark.sweep
@pytest.mark.parametrize("size", [600, 601], ids=str)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_all_pointwise_operators_equal_eager(place: Place, dtype: torch.dtype, size: int) -> None:
    hold_points_to_eager(place, dtype, slice(None), size)


def hold_rows_to_float64(
    place: Place, dtype: torch.dtype, shape: tuple[int, ...], part: slice
) -> None:
    """Compile a part of the row operators, and hold their errors to eager's."""
    rows = [row for row in reduction_cases.cases(shape, dtype) if "logcum" not in row[0]][part]
    expectations = [results(place.eager(f)(*a, **k)) for _, f, a, k in rows]
    compiled, inputs, nodes = compile_all(
        [(f, a, k) for _, f, a, k in rows], [len(e) for e in expectations], place.lower
    )
    fused = fused_names(compiled)
    wrong = []
    for (name, function, args, options), node, expected, found in zip(
        rows, nodes, expectations, compiled(*inputs), strict=True
    ):
        is_left = 1 in shape or (name in reduction_cases.IN_STEPS and dtype.itemsize == 2)
        if node.name not in fused and not is_left:
            wrong.append(f"{name}{options} is not fused")
        precise = {k: v if k == "dtype" else wide(v) for k, v in options.items()}
        true = results(function(*map(wide, args), **precise))
        for ours, eagers, right in zip(results(found), expected, true, strict=True):
            said = shortfall(ours, eagers, right)
            wrong += [f"{name}{options}: {said}"] if said else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("dtype", "shape", "part"),
    [
        (torch.float32, (3, 5, 17), slice(0, None, 2)),
        (torch.float16, (2, 3, 64), slice(1, None, 2)),
    ],
    ids=str,
)
def test_a_part_of_the_row_operators_is_as_exact_as_eager(
    place: Place, dtype: torch.dtype, shape: tuple[int, ...], part: slice
) -> None:
    hold_rows_to_float64(place, dtype, shape, part)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_random_shapes_are_as_exact_as_eager(
    place: Place, dtype: torch.dtype, seed: int
) -> None:
    random = Random(seed)
    shape = (random.randint(2, 4), random.randint(2, 70), random.choice([7, 32, 100, 1031, 2052]))
    hold_rows_to_float64(place, dtype, shape, slice(None))


def hold_programs_to_eager(place: Place, programs: list[Program]) -> None:
    """Compile programs as one, and hold each to eager."""
    gm, inputs = together(programs)
    with torch.no_grad():
        found, after = run(place.lower(gm, inputs), inputs)
        for one, own in programs:
            count = len(results_of(one))
            hold(found[:count], after[: len(own)], one, own, place.eager(one))
            found, after = found[count:], after[len(own) :]


@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.randoms(use_true_random=False))
def test_random_programs_agree_with_eager(place: Place, random: Random) -> None:
    hold_programs_to_eager(place, [random_program(random) for _ in range(5)])


def test_programs_run_as_cuda_text(place: Place) -> None:
    gm, inputs = random_program(Random(3))
    compiled = place.lower(gm, inputs)
    with torch.no_grad():
        compiled(*inputs)
    report = compiled.report()
    assert report.calls == 1
    assert report.fused >= 3
    assert "__global__" in compiled.source


def test_signs_of_quotients_that_are_zero_are_eagers(place: Place) -> None:
    by = (6.0, -3.0, 1.25, 1e-30, -1e30, float("inf"), -float("inf"))
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-30, -1e-30, 5.0, -5.0] * 3)

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *(x / number for number in by), x.view(6, 4) / y.view(6, 1)

    y = torch.tensor([6.0, -3.0, 1e-30, -1e30, 0.0, -0.0])
    module = place.lower(fxkit.capture(program, (x, y)).graph_module, (x, y))
    for found, expected in zip(module(x, y), program(x, y), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-45, equal_nan=True)
        assert torch.equal(found.signbit()[found == found], expected.signbit()[found == found])


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(SWEEP // AT_ONCE))
def test_many_random_programs_agree_with_eager(place: Place, part: int) -> None:
    seeds = range(part * AT_ONCE, (part + 1) * AT_ONCE)
    hold_programs_to_eager(place, [random_program(Random(seed)) for seed in seeds])
