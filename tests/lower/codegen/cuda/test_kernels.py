"""CUDA text, run on the processor: held to the loop IR's meaning, to eager and to float64."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from fxkit.analysis.equivalence import compare
from fxkit.lower.codegen.cuda.printer import nests_of, print_unit
from fxkit.lower.loop_ir.interpreter import interpret
from tests.lower.codegen.cuda.cases import CASES, Case, all_cases
from tests.lower.codegen.cuda.shim import build_on_cpu, run_on_cpu
from tests.lower.kernels import difference

Built = tuple[ctypes.CDLL, dict[str, Case]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    cases = all_cases()
    folder: Path = tmp_path_factory.mktemp("cuda")
    return build_on_cpu(print_unit({f"run_{n}": c.kernel for n, c in cases.items()}), folder), cases


def run(built: Built, name: str, **options: Any) -> list[torch.Tensor]:
    library, cases = built
    case = cases[name]
    return run_on_cpu(library, f"run_{name}", case.kernel, case.inputs, case.outputs, **options)


def meaning(case: Case) -> list[torch.Tensor]:
    """Return what the loop IR means, by its interpreter."""
    results = [torch.empty_like(output) for output in case.outputs]
    interpret(case.kernel, case.inputs, results)
    return results


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_its_loop_ir_means(built: Built, name: str) -> None:
    case = built[1][name]
    for found, expected in zip(run(built, name), meaning(case), strict=True):
        is_half = found.dtype in (torch.bfloat16, torch.float16)
        assert difference(found, expected) <= (1 if is_half else 8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_the_order_of_threads_does_not_matter(built: Built, name: str) -> None:
    forwards, backwards = run(built, name), run(built, name, is_backward=True)
    for one, other in zip(forwards, backwards, strict=True):
        assert difference(one, other) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_memory_that_is_not_aligned_is_walked_by_elements(built: Built, name: str) -> None:
    """Buffers begin where an element may, and not where sixteen bytes do."""
    case = built[1][name]
    shift = max(output.element_size() for output in case.outputs)
    for found, expected in zip(run(built, name, shift=shift), meaning(case), strict=True):
        is_half = found.dtype in (torch.bfloat16, torch.float16)
        assert difference(found, expected) <= (1 if is_half else 8)


FINITE = [n for n in CASES if "special" not in n and "_f16" not in n and "bf16" not in n]


@pytest.mark.parametrize("name", FINITE)
def test_errors_are_at_most_twice_those_of_eager(built: Built, name: str) -> None:
    case = built[1][name]
    wider = [a.double() if a.dtype == torch.float32 else a for a in case.args]
    eager, exact = as_tuple(case.program(*case.args)), as_tuple(case.program(*wider))
    for found, theirs, right in zip(run(built, name), eager, exact, strict=True):
        if not found.dtype.is_floating_point or not right.isfinite().all():
            continue
        assert compare(found, theirs, right.double()).is_within(found.dtype)


@pytest.mark.parametrize("name", [n for n in CASES if n.endswith(("_f16", "bf16"))])
def test_halves_are_rounded_where_eager_rounds(built: Built, name: str) -> None:
    case = built[1][name]
    eager = as_tuple(case.program(*case.args))
    for found, theirs in zip(run(built, name), eager, strict=True):
        both = theirs.isfinite() & found.isfinite()
        assert difference(found[both], theirs[both]) <= 1


@pytest.mark.parametrize("name", ["embedding", "embedding_normed", "picked", "embedded_sum_down"])
def test_an_index_out_of_bounds_stops_the_kernel(built: Built, name: str) -> None:
    library, cases = built
    case = cases[name]
    inputs = [t + 11 if t.dtype == torch.int64 else t for t in case.inputs]
    with pytest.raises(RuntimeError, match="CUDA error 710"):
        run_on_cpu(library, f"run_{name}", case.kernel, inputs, case.outputs)
    run(built, name)


def test_the_cases_are_of_every_kind_of_mapping() -> None:
    nests = {name: nests_of(case.kernel)[0] for name, case in all_cases().items()}
    found = [nest.mapping for nest in nests.values() if nest.mapping is not None]
    assert len(found) == len(nests)
    across = [one for one in found if one.is_across]
    rows = [one for one in found if one.items or (one.group > 1 and not one.is_across)]
    assert {one.group for one in rows} >= {4, 8, 16, 32, 128, 256, 512}
    assert any(one.splits > 1 for one in rows)
    assert any(one.splits > 1 for one in across)
    assert {one.width for one in found} == {1, 4, 8}
    assert {one.threads for one in found if one not in (*rows, *across)} == {128}


def test_a_sweep_of_split_rows_is_a_launch_of_its_own(built: Built) -> None:
    launches = ctypes.c_long.in_dll(built[0], "shim_launches")
    counts = {}
    for name in ("softmax_warp", "softmax_block", "softmax_long", "sum_all", "sum_down"):
        before = launches.value
        run(built, name)
        counts[name] = launches.value - before
    assert counts == {
        "softmax_warp": 1,
        "softmax_block": 1,
        "softmax_long": 3,
        "sum_all": 2,
        "sum_down": 2,
    }
