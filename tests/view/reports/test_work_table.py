"""The same work before and after, side by side."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxkit
from fxkit.view import profile
from fxkit.view.profiling.profile_result import Profile
from fxkit.view.reports.work_table import same_work, work_table
from tests.view import models

NAMES = ("eager", "fxkit")


@pytest.fixture(scope="module")
def measured() -> Profile:
    return profile(models.stack(1), models.stack_args(), warmup=0, iters=1, metrics=("bytes",))


def with_rows(base: Profile, **rows: tuple[str, float, tuple[str, ...]]) -> Profile:
    """Return a profile of rows that are given as operator, seconds, and nodes that they compute."""
    made = [
        replace(
            base.rows[0],
            name=name,
            operator=operator,
            family="kernel" if computes else "pointwise",
            seconds=seconds,
            computes=computes,
        )
        for name, (operator, seconds, computes) in rows.items()
    ]
    return replace(base, rows=tuple(made))


def lines(before: Profile, after: Profile) -> dict[str, tuple[float, float]]:
    return {work.key: work.seconds for work in same_work(before, after)}


def before_of(base: Profile) -> Profile:
    return with_rows(
        base,
        linear=("aten.linear", 4.0, ()),
        gelu=("aten.gelu", 1.0, ()),
        linear_1=("aten.linear", 5.0, ()),
        gelu_1=("aten.gelu", 2.0, ()),
        sin=("aten.sin", 0.5, ()),
    )


def test_a_kernel_stands_beside_the_nodes_that_it_computes(measured: Profile) -> None:
    after = with_rows(
        measured,
        call=("kernel_0", 3.0, ("linear", "gelu")),
        call_1=("kernel_1", 4.0, ("linear_1", "gelu_1")),
        sin=("aten.sin", 0.6, ()),
    )
    assert lines(before_of(measured), after) == {
        "kernel: linear + gelu": (12.0, 7.0),
        "aten.sin": (0.5, 0.6),
    }


def test_nothing_is_set_beside_a_kernel_whose_nodes_are_not_all_known(measured: Profile) -> None:
    after = with_rows(
        measured,
        call=("kernel_0", 3.0, ("linear", "gelu")),
        call_1=("kernel_0", 4.0, ("linear_1", "gelu_7")),
    )
    found = lines(before_of(measured), after)
    assert found["kernel: linear + gelu"] == (0.0, 7.0)
    assert found["aten.linear"] == (9.0, 0.0)


def test_names_of_another_graph_mean_nothing(measured: Profile) -> None:
    after = with_rows(
        measured, call=("kernel_0", 3.0, ("linear", "gelu")), sin=("aten.cos", 1.0, ())
    )
    assert lines(before_of(measured), after)["kernel: linear + gelu"] == (0.0, 3.0)


def test_times_add_up_on_both_sides(measured: Profile) -> None:
    before = before_of(measured)
    after = with_rows(
        measured,
        call=("kernel_0", 3.0, ("linear", "sin")),
        gelu=("aten.gelu", 1.0, ()),
        extra=("aten.exp", 0.25, ()),
    )
    found = same_work(before, after)
    assert sum(work.seconds[0] for work in found) == before.node_seconds
    assert sum(work.seconds[1] for work in found) == after.node_seconds


def test_small_lines_are_folded_and_added_up(measured: Profile) -> None:
    row = ("aten.sin", 1e-6, ())
    before = with_rows(measured, a=("aten.linear", 1.0, ()), b=row, c=("aten.cos", 2e-6, ()))
    html = work_table(before, before, NAMES)
    head, _, rest = html.partition("<details")
    assert "aten.linear" in head and "aten.sin" not in head
    assert "2 more lines, 3 µs in eager and 3 µs in fxkit" in rest
    assert "aten.sin" in rest and "aten.cos" in rest


@pytest.mark.parametrize("seconds", [None, (5.0, 0.5)])
def test_lines_add_up_to_a_whole_call(measured: Profile, seconds: Any) -> None:
    small = {f"s{i}": (f"aten.op{i}", 1e-6, ()) for i in range(3)}
    rows = with_rows(measured, a=("aten.linear", 1.0, ()), **small)
    before, after = replace(rows, end_to_end=1.5), replace(rows, end_to_end=0.75)
    html = work_table(before, after, NAMES, seconds)
    cells = [float(text) for text in re.findall(r'data-v="([^"]*)"', html)]
    assert sum(cells[0::2]) == pytest.approx((seconds or (1.5, 0.75))[0])
    assert sum(cells[1::2]) == pytest.approx((seconds or (1.5, 0.75))[1])
    assert "−250" in html or seconds is not None


def test_an_empty_profile_has_an_empty_table(measured: Profile) -> None:
    empty = with_rows(measured)
    assert work_table(empty, empty, NAMES).count("<tr>") == 1


def test_calls_of_kernels_are_called_so(measured: Profile) -> None:
    after = with_rows(measured, call=("kernel_0", 3.0, ("linear",)))
    assert "1 kernel call<" in work_table(before_of(measured), after, NAMES)


def test_a_real_program_is_told_by_its_work() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.sin() * 2, -1)

    args = (torch.randn(64, 256),)
    compiled = fxkit.lower.to_cpp(fxkit.capture(program, args).graph_module, args)
    before = profile(compiled.graph_module, args, warmup=0, iters=1)
    (work,) = same_work(before, profile(compiled, args, warmup=0, iters=1))
    assert work.key == "kernel: sin + mul + softmax"
    assert [row.name for row in work.before] == ["sin", "mul", "softmax"]
