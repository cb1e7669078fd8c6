"""Numbers that an operator can tell apart have different keys."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fxkit.ir.numbers import number_key


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1.5, 1.5, True),
        (0.0, -0.0, False),
        (math.nan, -math.nan, True),
        (math.inf, -math.inf, False),
        (complex(-0.0, 1), complex(0.0, 1), False),
        (complex(1, -0.0), complex(1, 0.0), False),
        (complex(1, math.nan), complex(1, math.nan), True),
        (2, 2, True),
        ("none", "none", True),
    ],
)
def test_keys_of_numbers(one: Any, other: Any, same: bool) -> None:
    assert (number_key(one) == number_key(other)) is same
