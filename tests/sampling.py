"""Which cases of a large table run in each run of the tests, and which in the sweeps alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import settings

_EVERY_CASE = False


def run_every_case(asked: bool) -> None:
    """Say, before tests are collected, whether `examples` are as many as in the sweeps."""
    global _EVERY_CASE
    _EVERY_CASE = asked


def runs_every_case() -> bool:
    """Tell whether sweeps run; a test that asks bears the mark `sampled`."""
    return _EVERY_CASE


def examples(count: int, *, of: int, **options: Any) -> Callable[[Any], Any]:
    """Let Hypothesis draw a few examples in each run of the tests, and many in the sweeps.

    Args:
        count: How many a run of the tests draws.
        of: How many the sweeps draw.
        options: Other settings of Hypothesis.
    """

    def limited(test: Any) -> Any:
        many = settings(max_examples=of if _EVERY_CASE else count, deadline=None, **options)
        return pytest.mark.sampled(many(test))

    return limited


def one_in(count: int, *axes: Iterable[Any]) -> list[Any]:
    """Return the product of some values, as cases of which one in `count` is no sweep.

    Each value is in as many of them as any other of its axis when `count` divides, or is, the
    length of another axis.

    Args:
        count: How many cases there are to one that runs in each run of the tests.
        axes: The values of each parameter.
    """
    indexed = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(
            *(value for _, value in case),
            marks=() if sum(index for index, _ in case) % count == 0 else (pytest.mark.sweep,),
        )
        for case in indexed
    ]


def is_left_to_sweeps(item: pytest.Item) -> bool:
    """Tell whether a test that is marked `one_in(count)` is none of those that run each time.

    As with `one_in`, of cases that are a product of several marks `parametrize`.
    """
    mark = item.get_closest_marker("one_in")
    if mark is None:
        return False
    params = item.callspec.params  # pyright: ignore[reportAttributeAccessIssue]
    axes = item.iter_markers("parametrize")
    return sum(_place_in(axis, params) for axis in axes) % mark.args[0] != 0


def _place_in(axis: pytest.Mark, params: Mapping[str, Any]) -> int:
    """Return which of an axis's values a case has."""
    names, values = axis.args[:2]
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    wanted = [params[name] for name in names]
    for place, value in enumerate(values):
        if hasattr(value, "marks"):  # of `pytest.param`
            value = value.values
        elif len(names) == 1:
            value = (value,)
        if all(one is other for one, other in zip(value, wanted, strict=True)):
            return place
    raise AssertionError(f"expected one of {names}, got {wanted}")


class Some:
    """Takes a few of a test's inner cases, others in each case of its parameters.

    With `--every-case`, which the sweeps set, it takes all.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._all = request.config.getoption("every_case")
        place = getattr(request.node, "callspec", None)
        self._start = sum(place.indices.values()) if place is not None else 0

    def __call__(self, values: Iterable[Any], count: int) -> Sequence[Any]:
        """Return `count` of the values, in order; they follow those of the case before."""
        everything = list(values)
        if self._all or count >= len(everything):
            return everything
        first = self._start * count
        picked = {(first + step) % len(everything) for step in range(count)}
        return [everything[index] for index in sorted(picked)]


Sample = Callable[[Iterable[Any], int], Sequence[Any]]
"""The type of the fixture `some`."""
