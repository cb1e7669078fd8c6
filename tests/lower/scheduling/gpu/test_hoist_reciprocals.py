"""A number that all of a row is divided by is inverted once."""

from __future__ import annotations

from fxkit.lower.scheduling.gpu.hoist_reciprocals import HoistReciprocals
from tests.lower.scheduling.nests import before_and_after, centred, summed


def test_what_a_row_is_divided_by_is_inverted() -> None:
    before, after = before_and_after(centred(3, 64), HoistReciprocals)
    assert "invert" not in str(before)
    assert str(after).count("invert %1") == 1


def test_nothing_is_inverted_without_a_division() -> None:
    before, after = before_and_after(summed(3, 64), HoistReciprocals)
    assert after == before
