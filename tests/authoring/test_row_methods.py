"""What folds a row with a function: methods of rows, `map`, means, `any`, `all`, lambdas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxkit
from fxkit.authoring.operators.row_list import RowList
from fxkit.authoring.operators.rowwise import RowOperator
from fxkit.errors import UnsupportedError


def squared(x):
    return x * x


@fxkit.row_operator(namespace="row_methods")
def rms_norm(row, eps=1e-6):
    scale = 1 / math.sqrt(row.mean(squared) + eps)
    return [x * scale for x in row]


@fxkit.row_operator(namespace="row_methods")
def softmax(row, temperature=1.0):
    top = row.max()
    total = row.sum(lambda x: math.exp((x - top) / temperature))
    return [math.exp((x - top) / temperature) / total for x in row]


@fxkit.row_operator(namespace="row_methods")
def norms(row):
    return row.sum(abs), row.max(abs), -row.min(lambda x: -abs(x)), row.mean(math.exp)


@fxkit.row_operator(namespace="row_methods")
def of_lists(row, weight):
    weighted = [x * w for x, w in zip(row, weight, strict=True)]
    return statistics.fmean(map(squared, weighted)), statistics.mean(x for x in row if x > -9)


@fxkit.row_operator(namespace="row_methods")
def with_defaults(row):
    return sum(row, 2.0), max((x for x in row if x > 0), default=0.5), min(row, default=0.0)


@fxkit.row_operator(namespace="row_methods")
def questions(row):
    return (
        1.0 if any(x > 2 for x in row) else 0.0,
        2.0 if all(x > -2 for x in row) else 0.0,
        3.0 if all(abs(x) < 2 for x in row if x > 0) else 0.0,
        sum(x > 0 for x in row),
    )


@fxkit.operator(namespace="row_methods")
def softened(x):
    return math.sqrt(x * x + 1.0)


@fxkit.row_operator(namespace="row_methods")
def of_operators(row):
    return [x * row.sum(softened) for x in softmax(row, 2.0)], max(map(softened, rms_norm(row)))


def folded(row, of):
    return row.sum(lambda x: of(x) - 1.0)


@fxkit.row_operator(namespace="row_methods")
def with_lambdas(row, weight):
    scale = folded(weight, lambda w: w * w)
    return folded(row, lambda x: x * scale)


OPERATORS = [rms_norm, softmax, norms, of_lists, with_defaults, questions, with_lambdas]
SMOOTH = [rms_norm, softmax, norms, of_lists, of_operators, with_lambdas]


def operands(operator: RowOperator, **options: Any) -> list[torch.Tensor]:
    names = operator.definition.tensors
    return [torch.randn(6, 7, dtype=torch.float64, **options) * 1.5 for _ in names]


def several(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda op: op.__name__)
def test_values_are_those_of_python(operator: RowOperator) -> None:
    tensors = operands(operator)
    rows = [several(operator(*(t[i].tolist() for t in tensors))) for i in range(6)]
    expected = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
    for found in (operator(*tensors), operator.composition(*tensors)):
        for ours, theirs in zip(several(found), expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs)
    assert operator.kernels.reason is None


@pytest.mark.parametrize("operator", SMOOTH, ids=lambda op: op.__name__)
def test_derivatives(operator: RowOperator) -> None:
    tensors = [t.detach().requires_grad_() for t in operands(operator)]
    assert torch.autograd.gradcheck(operator, tensors)
    assert torch.autograd.gradgradcheck(operator, tensors)


def test_operators_on_rows_may_call_others() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    root = (x * x + 1).sqrt()
    weights, largest = of_operators(x)
    expected = torch.softmax(x / 2, -1) * root.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)
    normed = torch.nn.functional.rms_norm(x, (5,), None, 1e-6)
    torch.testing.assert_close(largest, (normed * normed + 1).sqrt().amax(-1))


def test_a_list_with_the_methods_of_a_row() -> None:
    row = RowList([1.0, -2.0, 4.0])
    assert (row.sum(), row.max(), row.min(abs), row.mean()) == (3.0, 4.0, 1.0, 1.0)
    assert math.isnan(RowList().mean())


def has_another_method(row):
    return row.median()


def method_of_a_list(row):
    return [x * 2 for x in row].sum()


def folds_with_a_number(row):
    return row.sum(2.0)


def folds_with_two(row):
    return row.max(abs, abs)


def folds_by_name(row):
    return row.mean(of=abs)


def lambda_of_two(row):
    return row.sum(lambda x, y: x * y)


def lambda_with_default(row):
    return row.sum(lambda x, y=2.0: x * y)


def lambda_in_a_name(row):
    f = lambda x: x * 2  # noqa: E731
    return row.sum(f)


def lambda_as_a_number(row):
    return row.sum(lambda x: folded(x, lambda y: y))


def returns_a_row_of_each(row):
    return row.sum(lambda x: row)


def maps_some_of_two(row):
    return sum(map(max, row, [x for x in row if x > 0]))


def parts_of_another(row):
    return sum(softmax([x for x in row if x > 0]))


REFUSED: dict[Callable[..., Any], tuple[int, str, str]] = {
    has_another_method: (1, "sum, max, min, mean of a row, got .median", "comprehension"),
    method_of_a_list: (1, "a parameter, got it of a list", "sum(...)"),
    folds_with_a_number: (1, "a function of elements, got float", "lambda x: x * x"),
    folds_with_two: (1, "one function for row.max, got 2", "row.max()"),
    folds_by_name: (1, "one function for row.mean", "row.mean(lambda"),
    lambda_of_two: (1, "2 arguments of a lambda, got 1", "without names"),
    lambda_with_default: (1, "a lambda of plain parameters", "name each"),
    lambda_in_a_name: (1, "as the argument of a call", "with def"),
    lambda_as_a_number: (0, "an attribute of a module", "no methods"),
    returns_a_row_of_each: (1, "of a row, got sum", "sum(f(x) for x in row)"),
    maps_some_of_two: (1, "map of rows without conditions", "sum(f(x) for x in row)"),
    parts_of_another: (1, "a row for row of softmax", "without a condition"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_it_is_refused_with_its_line(function: Callable[..., Any]) -> None:
    offset, reason, remedy = REFUSED[function]
    with pytest.raises(UnsupportedError) as caught:
        fxkit.row_operator(function)
    assert reason in caught.value.message
    assert remedy in (caught.value.hint or "")
    line = function.__code__.co_firstlineno + offset
    assert f"test_row_methods.py:{line}" in (caught.value.source or "") or not offset
