"""Loops over rows, and scans: what they compute, their derivatives, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

import fxkit
from fxkit.authoring.operators.rowwise import RowOperator
from fxkit.errors import UnsupportedError


@fxkit.row_operator(namespace="row_loops")
def rms_norm(row, eps=1e-6):
    total = 0.0
    for x in row:
        total += x * x
    scale = 1 / math.sqrt(total / len(row) + eps)
    return [x * scale for x in row]


@fxkit.row_operator(namespace="row_loops")
def spread(row):
    low, high, count = math.inf, -math.inf, 0
    for x in row:
        if x > high:
            high = x
        low = min(low, x)
        if x > 0:
            count += 1
    return high - low, count


@fxkit.row_operator(namespace="row_loops")
def signed(row, weight):
    total = 0.0
    for x, w in zip(row, weight, strict=True):
        if x == 0.0:
            continue
        total = total + x * w if w > 0 else total - x
    return total


@fxkit.row_operator(namespace="row_loops")
def parts_up_to(row):
    total = sum(row)
    return [part / total for part in accumulate(row)]


@fxkit.row_operator(namespace="row_loops")
def highest_up_to(row):
    return list(itertools.accumulate(row, max))


OPERATORS = [rms_norm, spread, signed, parts_up_to, highest_up_to]
by_name = pytest.mark.parametrize("operator", OPERATORS, ids=lambda op: op.__name__)


def operands(operator: RowOperator) -> list[torch.Tensor]:
    return [torch.randn(3, 7, dtype=torch.float64) for _ in operator.definition.tensors]


def several(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@by_name
def test_values_are_those_of_python(operator: RowOperator) -> None:
    tensors = operands(operator)
    rows = [several(operator.__wrapped__(*(t[i].tolist() for t in tensors))) for i in range(3)]
    expected = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
    for found in (operator(*tensors), operator.composition(*tensors)):
        for ours, theirs in zip(several(found), expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs)
    assert operator.kernels.reason is None


@pytest.mark.parametrize("operator", [rms_norm, signed, parts_up_to], ids=lambda op: op.__name__)
def test_derivatives(operator: RowOperator) -> None:
    tensors = [t.requires_grad_() for t in operands(operator)]
    assert torch.autograd.gradcheck(operator, tensors)
    assert torch.autograd.gradgradcheck(operator, tensors)


def test_a_running_extreme_has_no_derivative_of_its_own() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    with pytest.raises(UnsupportedError, match="got a running extreme"):
        highest_up_to(x).sum().backward()


def product(row):
    total = 1.0
    for x in row:
        total *= x
    return total


def leaves_early(row):
    total = 0.0
    for x in row:
        if x > 3:
            break
        total += x
    return total


def mixes(row):
    total, best = 0.0, 0.0
    for x in row:
        best = max(best, x)
        total += best
    return total + best


REFUSED: dict[Callable[..., Any], tuple[int, str, str]] = {
    product: (2, "'total' to be a total or an extreme", "total += f(x)"),
    leaves_early: (2, "one that may end before", "if condition else"),
    mixes: (2, "'total' to be a total or an extreme", "accumulate"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_it_is_refused_with_its_line(function: Callable[..., Any]) -> None:
    offset, reason, remedy = REFUSED[function]
    with pytest.raises(UnsupportedError) as caught:
        fxkit.row_operator(function)
    assert reason in caught.value.message
    assert remedy in (caught.value.hint or "")
    line = function.__code__.co_firstlineno + offset
    assert f"test_row_loops.py:{line}" in (caught.value.source or "")


@fxkit.row_operator(namespace="row_loops")
def largest_and_count(row):
    largest, smallest, count = -math.inf, math.inf, 0
    for x in row:
        largest = max(largest, x)
        smallest = min(smallest, x)
        if x > 0:
            count += 1
    return largest, smallest, count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(2, 0), (0,), (0, 3), (3, 0, 0)])
def test_rows_of_no_elements_give_what_the_loop_begins_with(shape, dtype) -> None:
    x = torch.zeros(shape, dtype=dtype)
    lead = shape[:-1]
    ends = torch.full(lead, math.inf, dtype=dtype)
    expected = -ends, ends, torch.zeros(lead, dtype=torch.int64)
    compiled = fxkit.compile(largest_and_count)
    compiled(x)
    for found in (largest_and_count(x), largest_and_count.composition(x), compiled(x)):
        assert all(map(torch.equal, found, expected))
        assert [one.dtype for one in found] == [one.dtype for one in expected]
