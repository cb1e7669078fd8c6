"""The layered layout by itself: ranks, distances, stubs, and the least-squares step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxkit.view.drawings.coordinates import _pool
from fxkit.view.drawings.layout import Link, place


def boxes(count: int) -> list[tuple[float, float]]:
    return [(40.0, 20.0)] * count


def test_a_chain_is_one_straight_line() -> None:
    placed = place(boxes(5), [Link(i, i + 1) for i in range(4)])
    assert len({round(x, 3) for x in placed.x}) == 1
    assert placed.y == sorted(placed.y)
    assert placed.width == 40


def test_users_stand_below_and_apart() -> None:
    placed = place(boxes(4), [Link(0, 1), Link(0, 2), Link(0, 3)])
    assert all(placed.y[i] >= placed.y[0] + 20 for i in (1, 2, 3))
    xs = sorted(placed.x[1:])
    assert all(right - left >= 40 for left, right in pairwise(xs))
    assert placed.x[0] == pytest.approx(xs[1])


def test_pinned_boxes_stand_at_the_ends() -> None:
    links = [Link(0, 2), Link(1, 3), Link(2, 4), Link(3, 5), Link(4, 6)]
    placed = place(boxes(8), [*links, Link(3, 7)], top=2, bottom=2)
    assert placed.y[0] == placed.y[1] == 0
    assert placed.y[6] == placed.y[7] == max(placed.y)
    assert min(placed.y[2:6]) > 0


def test_crossing_users_are_reordered() -> None:
    placed = place(boxes(6), [Link(0, 5), Link(1, 4), Link(2, 3)])
    by_x = sorted(range(3), key=lambda i: placed.x[i])
    partner = {0: 5, 1: 4, 2: 3}
    below = [placed.x[partner[i]] for i in by_x]
    assert below == sorted(below)


def test_a_value_read_far_away_and_often_is_cut() -> None:
    chain = [Link(i, i + 1) for i in range(1, 9)]
    mask = [Link(0, i) for i in (3, 5, 7, 9)]
    whole = place(boxes(10), [*chain, *mask])
    assert whole.stubs == []
    cut = place(boxes(10), [*chain, *mask], stub_size=lambda _s, _e, uses: (20.0 + uses, 10.0))
    assert [stub.at_source for stub in cut.stubs].count(True) == 1
    assert [stub.at_source for stub in cut.stubs].count(False) == 4
    assert [route is None for route in cut.routes] == [False] * 8 + [True] * 4


def test_a_value_read_by_neighbours_is_not_cut() -> None:
    links = [Link(0, i) for i in range(1, 6)]
    assert place(boxes(6), links, stub_size=lambda *_: (20.0, 10.0)).stubs == []


def test_arrivals_do_not_cross() -> None:
    placed = place(boxes(4), [Link(0, 3), Link(1, 3), Link(2, 3)])
    ends = sorted((placed.x[i], placed.routes[i][-1][0]) for i in range(3))  # pyright: ignore
    assert [end for _, end in ends] == sorted(end for _, end in ends)


@given(
    st.lists(
        st.tuples(st.floats(-100, 100), st.floats(0.1, 10), st.floats(0, 30)),
        min_size=1,
        max_size=12,
    )
)
def test_pooling_keeps_distances_and_is_no_worse_than_any_neighbour(
    rows: list[tuple[float, float, float]],
) -> None:
    wanted, weights = [r[0] for r in rows], [r[1] for r in rows]
    gaps = [r[2] for r in rows[1:]]
    found = _pool(wanted, weights, gaps)
    assert all(b - a >= gap - 1e-6 for (a, b), gap in zip(pairwise(found), gaps, strict=True))

    def cost(values: list[float]) -> float:
        return sum(w * (v - t) ** 2 for v, t, w in zip(values, wanted, weights, strict=True))

    generator = random.Random(0)
    for _ in range(20):
        other = [v + generator.uniform(-1, 1) for v in found]
        if all(b - a >= gap for (a, b), gap in zip(pairwise(other), gaps, strict=True)):
            assert cost(found) <= cost(other) + 1e-6
