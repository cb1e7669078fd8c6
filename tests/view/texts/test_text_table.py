"""Numbers, units and columns as a person reads them."""

from __future__ import annotations

import pytest

from fxkit.view.texts.labels import clip, columns, one_line
from fxkit.view.texts.text_table import aligned, duration, percent, plural, quantity, table


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "", "0"),
        (999, "", "999"),
        (1000, "", "1k"),
        (22_713_216, "", "22.7M"),
        (999_999, "B", "1 MB"),
        (1536, "B", "1.54 kB"),
        (2.5e9, "FLOP", "2.5 GFLOP"),
        (None, "B", "?"),
    ],
)
def test_quantity(value: float | None, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (4.2e-8, "42 ns"),
        (9.99e-7, "999 ns"),
        (1.5e-6, "1.5 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (125.0, "125 s"),
        (None, "?"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_percent_and_plural() -> None:
    assert (percent(1, 8), percent(1, 0)) == ("12.5 %", "–")
    assert (plural(1, "node"), plural(1200, "node")) == ("1 node", "1,200 nodes")


def test_table_lines_up() -> None:
    lines = table(["name", "n"], [["a", "10"], ["日本", "5"]], align="<>").splitlines()
    assert lines == ["name   n", "────  ──", "a     10", "日本   5"]
    assert {columns(line) for line in lines} == {8}


def test_rows_may_be_short() -> None:
    assert aligned([["a", "b"], ["c"]]) == ["a  b", "c"]


def test_clip_and_one_line() -> None:
    assert clip("abcdef", 6) == "abcdef"
    assert clip("abcdefg", 6) == "abcde…"
    assert columns(clip("日本語日本語", 6)) <= 6
    assert one_line("a\nb\x00é") == "a\\nb\\x00é"
