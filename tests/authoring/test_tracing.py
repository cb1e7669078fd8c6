"""Functions whose source is not to be had are called with scalars that record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxkit
from fxkit.errors import UnsupportedError

TEXT = """
import math
from math import exp

def helper(x):
    return x * 2 if x > 0 else x

def branches(x, y, width=0.5):
    a = helper(x) + exp(y)
    if abs(x) > width and not y > 3:
        return max(a, math.log1p(abs(y)), 0.25)
    steps = 0
    while a > 1 and steps < 4:
        a = a / 2
        steps += 1
    return a + steps

def both(x):
    return (x, -x) if x > 0 else (0.0, x)

def gamma(x):
    return math.gamma(x)

def method(x):
    return x.exp()

def endless(x):
    while x > 1:
        x = x / 2
    return x

def recursive(x):
    return recursive(x - 1) if x > 0 else x

def text(x):
    return "a"

def row(row):
    return sum(row)
"""

space: dict[str, Any] = {}
exec(TEXT, space)


def test_all_paths_are_found() -> None:
    operator = fxkit.operator(name="traced_branches")(space["branches"])
    x, y = torch.randn(2, 50, dtype=torch.float64) * 2
    for width in (0.5, 1.5):
        pairs = zip(x.tolist(), y.tolist(), strict=True)
        expected = torch.tensor([space["branches"](*p, width) for p in pairs], dtype=torch.float64)
        torch.testing.assert_close(operator(x, y, width), expected)
    operands = [x.requires_grad_(), y.requires_grad_()]
    assert torch.autograd.gradcheck(operator, operands)


def test_several_results() -> None:
    first, second = fxkit.operator(name="traced_both")(space["both"])(torch.tensor([2.0, -1.0]))
    assert (first.tolist(), second.tolist()) == ([2.0, 0.0], [-2.0, -1.0])


REFUSED = {
    "gamma": ("expected arithmetic of scalars in gamma", "a file or a notebook cell"),
    "method": ("no attribute 'exp'", "a file or a notebook cell"),
    "endless": ("known to end", "count its steps"),
    "recursive": ("known to end", "count its steps"),
    "text": ("scalars to be returned, got str", "return a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_lack_is_refused(name: str) -> None:
    reason, remedy = REFUSED[name]
    with pytest.raises(UnsupportedError) as caught:
        fxkit.operator(name=f"traced_{name}")(space[name])
    assert reason in caught.value.message
    assert remedy in (caught.value.hint or "")
    assert "<string>:" in (caught.value.source or "")


def test_rows_are_read_from_source_alone() -> None:
    with pytest.raises(UnsupportedError, match="whose source can be read"):
        fxkit.row_operator(name="traced_row")(space["row"])
