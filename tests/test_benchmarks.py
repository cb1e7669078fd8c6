"""What the table of kernels says of its goals; nothing is timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.fusion import bounds, table
from benchmarks.fusion.case import Case, Family, Work, of_function
from benchmarks.fusion.table import FAMILIES, Measured, summary
from benchmarks.fusion.ways import EAGER, INDUCTOR, KEPT, Way

CASE = of_function("double 4", lambda x: x * 2, (4,), in_microseconds=2)


def measured(eager: float, inductor: float, ours: float, **options: object) -> Measured:
    values = {"roofline": 1.0, "errors": (1e-7, 1e-7)} | options
    seconds = {EAGER: eager, INDUCTOR: inductor, KEPT: ours}
    least = seconds | {KEPT: ours / 2}
    return Measured(CASE, seconds, least, **values)  # type: ignore[arg-type]


def test_what_is_slower_is_said() -> None:
    family = Family((CASE,))
    assert measured(1e-6, 1e-6, 1e-6).verdict(family) == ""
    assert measured(1e-6, 9e-7, 1e-6).verdict(family) == "BELOW Inductor"
    assert measured(9e-7, 2e-6, 1e-6).verdict(family) == "SLOWER than eager"
    assert measured(1.0, 1.0, 3e-6).verdict(family) == "more than 2 µs"


def test_errors_and_rooflines_are_said() -> None:
    far = measured(9.0, 9.0, 1.5)
    assert "1.5 × roofline" in far.verdict(Family((CASE,), is_memory_bound=True))
    assert "roofline" not in far.verdict(Family((CASE,)))
    wrong = measured(1e-6, 1e-6, 1e-6, errors=(1e-7, 3e-7))
    assert wrong.verdict(Family((CASE,))) == "ERROR above twice eager's"


def test_a_summary_tells_the_goal_and_who_misses_it() -> None:
    found = [measured(4.0, 4.0, 1.0, roofline=0.5), measured(1.0, 0.25, 1.0, roofline=0.5)]
    text = summary("some", Family((CASE,), goal=2), found)
    assert text == (
        "some, geometric mean: 1.00 × Inductor (goal 2: NOT met; 2.00 at the roofline), "
        "slower: double, by least times 2.00; 2.00 × eager, no case slower, by least times 4.00"
    )
    assert "(goal 2: NOT met)," in summary("some", Family((CASE,), 2, has_roofline=False), found)
    assert "(goal 1: met)" in summary("some", Family((CASE,)), found)


def test_each_case_has_a_name_of_its_own() -> None:
    names = [case.name.split()[0] for family in FAMILIES.values() for case in family.cases]
    assert len(set(names)) == len(names)


def test_bytes_and_errors_of_a_step() -> None:
    x = torch.randn(8, requires_grad=True)
    step = Work(torch.nn.Tanh(), (x,), (x,))
    assert bounds.bytes_moved(step) == 5 * 32
    assert bounds.bytes_moved(Work(torch.tanh, (x,))) == 2 * 32
    true = bounds.exact(step)
    assert true[0].dtype == torch.float64
    assert bounds.error(bounds.run(step), true) < 1e-6


@pytest.mark.parametrize("name", ["overhead", "products"])
def test_cases_are_the_same_in_every_run(name: str) -> None:
    def results(case: Case) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return bounds.run(case.make())

    case = FAMILIES[name].cases[0]
    torch.testing.assert_close(results(case), results(case), rtol=0, atol=0)


def test_what_one_call_errs_by_chance_is_judged_by_many() -> None:
    x = torch.tensor([1.0, 3.0])
    first = x.clone()

    def unlucky(x: torch.Tensor) -> torch.Tensor:
        return x / 3 * (1 + 2.0**-20 * torch.equal(x, first))

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x / 3 * (1 + 2.0**-20)

    def error_of(program: Callable[[torch.Tensor], torch.Tensor]) -> float:
        ways = {EAGER: Way(lambda: x / 3), KEPT: Way(lambda: program(x))}
        return table.errors(Work(lambda x: x / 3, (x,)), ways)[1]

    assert 2.0**-25 < error_of(unlucky) < 2.0**-23
    assert error_of(wrong) > 2.0**-21
    assert torch.equal(x, first)
