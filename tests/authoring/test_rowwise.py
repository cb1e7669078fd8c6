"""Authored operators on rows: their values, derivatives and registrations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fxkit
from fxkit.authoring.operators.rowwise import RowOperator
from fxkit.errors import UnsupportedError
from tests.sampling import one_in


@fxkit.row_operator(namespace="rows")
def rms_norm(row, weight, eps=1e-6, offset=1.0):
    scale = 1 / math.sqrt(sum(x * x for x in row) / len(row) + eps)
    return [x * scale * (w + offset) for x, w in zip(row, weight, strict=True)]


@fxkit.row_operator(namespace="rows")
def softmax(row, temperature=1.0):
    top = max(row)
    powers = [math.exp((x - top) / temperature) for x in row]
    total = sum(powers)
    return [p / total for p in powers]


@fxkit.row_operator(namespace="rows")
def log_cosh_weights(row):
    raw = [abs(x) + math.log1p(math.exp(-2.0 * abs(x))) for x in row]
    total = sum(raw)
    return [x / total for x in raw]


@fxkit.row_operator(namespace="rows")
def quantile_loss(row, target, q=0.9):
    losses = [max(q * (t - x), (q - 1.0) * (t - x)) for x, t in zip(row, target, strict=True)]
    return sum(losses) / len(row)


@fxkit.row_operator(namespace="rows")
def standardised(row):
    mean = sum(row) / len(row)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in row) / len(row) + 1e-5)
    return [(x - mean) / deviation for x in row], mean, deviation


@fxkit.row_operator(namespace="rows")
def scaled(row, factor: float):
    return [x * factor for x in row]


@fxkit.row_operator(namespace="rows")
def positive_mean(row):
    count = sum(1.0 for x in row if x > 0)
    return sum(x for x in row if x > 0) / max(count, 1.0)


@fxkit.row_operator(namespace="rows")
def log_sum(row):
    top = max(row)
    return top + math.log(sum(math.exp(x - top) for x in row))


@fxkit.row_operator(namespace="rows")
def extent(row):
    return max(row) - min(row)


def sparse_gradient(grad, row):
    ours = softmax_support(row)
    mean = sum(g * s for g, s in zip(grad, ours, strict=True)) / sum(ours)
    return [s * (g - mean) for g, s in zip(grad, ours, strict=True)]


def threshold(row):
    """Where sparsemax is zero: found by bisection, then computed from the elements above it."""
    low, high = max(row) - 1.0, max(row)
    for _ in range(10):
        middle = 0.5 * (low + high)
        is_low = sum(max(x - middle, 0.0) for x in row) > 1.0
        low, high = (middle if is_low else low), (high if is_low else middle)
    return (sum(x for x in row if x > low) - 1.0) / sum(1.0 for x in row if x > low)


def softmax_support(row):
    low = threshold(row)
    return [1.0 if x > low else 0.0 for x in row]


@fxkit.row_operator(namespace="rows", gradient=sparse_gradient)
def sparsemax(row):
    low = threshold(row)
    return [max(x - low, 0.0) for x in row]


@fxkit.row_operator(namespace="rows")
def sparsemax_derived(row):
    low = threshold(row)
    return [max(x - low, 0.0) for x in row]


OPERATORS = [rms_norm, softmax, log_cosh_weights, quantile_loss, standardised, scaled,
             positive_mean, log_sum, extent, sparsemax, sparsemax_derived]  # fmt: skip
one_of_two = pytest.mark.parametrize("operator", one_in(2, OPERATORS), ids=lambda op: op.__name__)
by_name = pytest.mark.parametrize("operator", OPERATORS, ids=lambda op: op.__name__)


def operands(operator: RowOperator, *shape: int, **options: Any) -> list[torch.Tensor]:
    rows = operator.definition.rows or frozenset()
    names = operator.definition.tensors
    return [torch.randn(shape if name in rows else shape[:-1], **options) for name in names]


def several(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def of_lists(operator: RowOperator, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute a matrix by the Python function, row by row."""
    rows = [
        several(operator.__wrapped__(*(t[i].tolist() for t in tensors)))
        for i in range(tensors[0].shape[0])
    ]
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


@by_name
def test_values_are_those_of_python(operator: RowOperator) -> None:
    tensors = operands(operator, 5, 9, dtype=torch.float64)
    found = several(operator(*tensors))
    for ours, expected in zip(found, of_lists(operator, tensors), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    assert operator.kernels.reason is None
    again = several(operator(*operands(operator, 3, 14, dtype=torch.float64)))
    assert len(again) == len(found)
    assert operator.kernels.builds <= 2


@pytest.mark.parametrize(
    ("shape", "operator"),
    one_in(5, [(1,), (3, 1), (2, 3, 33), (0, 4), (65,)], OPERATORS),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_shapes_and_layouts(operator: RowOperator, shape: tuple[int, ...]) -> None:
    tensors = operands(operator, *shape)
    for given in (tensors, [t.transpose(0, -1).contiguous().transpose(0, -1) for t in tensors]
                  if len(shape) > 1 and operator is not scaled else tensors):  # fmt: skip
        found, exact = several(operator(*given)), several(operator.reference(*given))
        composed = several(operator.composition(*given))
        for ours, theirs, expected in zip(found, composed, exact, strict=True):
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours.double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.one_in(3)
@one_of_two
def test_derivatives(operator: RowOperator) -> None:
    tensors = [t.requires_grad_() for t in operands(operator, 3, 5, dtype=torch.float64)]
    assert torch.autograd.gradcheck(operator, tensors)
    assert torch.autograd.gradgradcheck(operator, tensors)


@pytest.mark.one_in(3)
@one_of_two
def test_torch_accepts_the_registration(operator: RowOperator) -> None:
    tensors = tuple(t.requires_grad_() for t in operands(operator, 3, 5))
    torch.library.opcheck(operator.overload, tensors)


@by_name
def test_vmap_is_a_loop(operator: RowOperator) -> None:
    tensors = operands(operator, 4, 3, 5)
    looped = [several(operator(*(t[i] for t in tensors))) for i in range(4)]
    expected = [torch.stack(results) for results in zip(*looped, strict=True)]
    torch.testing.assert_close(several(torch.vmap(operator)(*tensors)), tuple(expected))


def test_rows_broadcast_and_lie_along_any_dimension() -> None:
    x, weight = torch.randn(4, 6, 5), torch.randn(6)
    expected = rms_norm(x.transpose(1, 2), weight).transpose(1, 2)
    torch.testing.assert_close(rms_norm(x, weight, dim=1), expected)
    torch.testing.assert_close(softmax(x, dim=0), torch.softmax(x, 0))
    torch.testing.assert_close(log_sum(x, dim=-2), torch.logsumexp(x, -2))
    with pytest.raises(IndexError, match=r"a dimension in \[-3, 2\], got 3"):
        softmax(x, dim=3)


def test_half_precision_and_nan() -> None:
    x = torch.randn(7, 65).bfloat16()
    assert softmax(x).dtype == torch.bfloat16
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(extent(x.half()), x.half().amax(-1) - x.half().amin(-1))
    x = torch.tensor([[1.0, math.nan, 2.0], [1.0, 2.0, 3.0]])
    torch.testing.assert_close(extent(x), x.amax(-1) - x.amin(-1), equal_nan=True)


@by_name
def test_it_is_one_node_that_the_fuser_takes_in(operator: RowOperator) -> None:
    tensors = tuple(operands(operator, 8, 16))

    def program(*tensors: torch.Tensor) -> torch.Tensor:
        found = several(operator(*[t * 2 for t in tensors]))
        return found[0] + 1

    fast = fxkit.compile(program)
    torch.testing.assert_close(fast(*tensors), program(*tensors))
    assert operator.overload in [node.target for node in fast.graph_module.graph.nodes]
    (module,) = fast.compiled_modules
    assert any(operator.__name__ in "".join(r.nodes) for r in module.regions if r.kernel)


def test_of_lists_it_is_the_function_itself() -> None:
    assert scaled([1.0, 2.0], 3.0) == [3.0, 6.0]
    assert extent([1.0, 4.0]) == 3.0


def test_torch_compile_keeps_it() -> None:
    x = torch.randn(8, 16)

    def program(x: torch.Tensor) -> torch.Tensor:
        return softmax(x * 2, dim=0) + 1

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), program(x))


def adds_rows(row):
    return row + 1


def indexes(row):
    return row[0]


def returns_a_part(row):
    return [x for x in row if x > 0]


def sorts(row):
    return sorted(row)


def only_numbers(x: float):
    return x


REFUSED = {
    adds_rows: ("a number, got a row", "for x in row"),
    indexes: ("element of a tuple", "neighbours"),
    returns_a_part: ("whole rows", "without a condition"),
    sorts: ("got sorted", "sum(f(x) for x in row)"),
    only_numbers: ("at least one parameter that is a row", "annotation"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_it_is_refused(function: Any) -> None:
    reason, remedy = REFUSED[function]
    with pytest.raises(UnsupportedError) as caught:
        fxkit.row_operator(function)
    assert reason in caught.value.message
    assert remedy in (caught.value.hint or "")
    assert "test_rowwise.py:" in (caught.value.source or "")


def _repeated(row, count: int):
    return [x * count for x in row]


def test_a_parameter_that_is_annotated_as_int_is_one_number_a_row() -> None:
    repeated, x = fxkit.row_operator(_repeated), torch.randn(3, 4)
    counts = torch.tensor([1, 2, 3])
    torch.testing.assert_close(repeated(x, counts), x * counts[:, None])
    torch.testing.assert_close(repeated(x, 2), x * 2)
