"""What runs in each run of the tests, and what in the sweeps alone."""

from __future__ import annotations

import itertools

import pytest

LETTERS, NUMBERS, PAIRS = "abcd", range(3), [(0, 1), (2, 3)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_case_in_two_of_a_product_runs(
    letter: str, number: int, first: int, second: int, request: pytest.FixtureRequest
) -> None:
    place = LETTERS.index(letter) + number + PAIRS.index((first, second))
    assert (place % 2 == 1) == (request.node.get_closest_marker("sweep") is not None)


def test_each_pair_of_values_is_left_but_of_the_shortest_axis() -> None:
    cases = itertools.product(range(4), range(3), range(2))
    kept = [case for case in cases if sum(case) % 2 == 0]
    assert len(kept) == 12
    assert len({case[:2] for case in kept}) == 12
