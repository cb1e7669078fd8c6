"""Integer expressions over loop variables: values, ranges and C++."""

from __future__ import annotations

import pytest
import torch

from fxkit.errors import InvalidGraphError
from fxkit.lower.loop_ir.index_expressions import (
    IndexValue,
    binary,
    equal,
    less,
    range_of,
    smaller,
    text_of,
    value_of,
    variable,
    variables_of,
)

I0, J0 = variable("i"), variable("j")

# Expression → its C++, its value for i = 7 and j = 2, its range for i in 0 … 9 and j in 1 … 4.
CASES: dict[str, tuple[IndexValue, int, tuple[int, int]]] = {
    "i * 4 + j": (binary("+", binary("*", I0, 4), J0), 30, (1, 40)),
    "(i + j) * 4": (binary("*", binary("+", I0, J0), 4), 36, (4, 52)),
    "i / 3 % 2": (binary("%", binary("/", I0, 3), 2), 0, (0, 1)),
    "i / (3 * j)": (binary("/", I0, binary("*", 3, J0)), 1, (0, 3)),
    "12 - i": (binary("-", 12, I0), 5, (3, 12)),
    "i - (j - 1)": (binary("-", I0, binary("-", J0, 1)), 6, (-3, 9)),
    "i % 20": (binary("%", I0, 20), 7, (0, 9)),
    "i < 8 ? i : 8": (smaller(I0, 8), 7, (0, 8)),
    "i < 5": (less(I0, 5), 0, (0, 1)),
    "j == 2": (equal(J0, 2), 1, (0, 1)),
    "6": (binary("*", 2, 3), 6, (6, 6)),
}


@pytest.mark.parametrize("text", CASES)
def test_an_expression_is_its_text_its_value_and_its_range(text: str) -> None:
    expression, value, span = CASES[text]
    assert text_of(expression) == text
    assert value_of(expression, {"i": 7, "j": 2}) == value
    assert range_of(expression, {"i": (0, 9), "j": (1, 4)}) == span


@pytest.mark.parametrize("text", CASES)
def test_a_range_holds_all_values(text: str) -> None:
    expression, _, (low, high) = CASES[text]
    grid = {"i": torch.arange(10).view(-1, 1), "j": torch.arange(1, 5)}
    values = torch.as_tensor(value_of(expression, grid)).long()
    assert low <= int(values.min())
    assert int(values.max()) <= high


def test_operands_that_change_nothing_vanish() -> None:
    assert binary("*", I0, 1) is I0
    assert binary("+", I0, 0) is I0
    assert binary("/", I0, 1) is I0
    assert binary("%", I0, 1) == 0
    assert list(variables_of(binary("+", I0, binary("*", J0, 4)))) == ["i", "j"]


def test_a_variable_that_is_not_known_is_named() -> None:
    with pytest.raises(InvalidGraphError, match="expected variables that are defined, got 'j'"):
        range_of(binary("+", I0, J0), {"i": (0, 9)})
