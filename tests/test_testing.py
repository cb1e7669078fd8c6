"""The proofs: a wrong rule of each kind is caught, a right one is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxkit.errors import NumericsError, RewriteError
from fxkit.ir.types import TensorType
from fxkit.patterns.language import operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Rule, rule
from fxkit.testing import (
    assert_equivalent,
    assert_rewrites,
    compare,
    pattern_module,
    prove,
)


def _integers_only(match: Match) -> bool:
    known = match.type("x")
    return isinstance(known, TensorType) and not known.dtype.is_floating_point


def _of_same_dtype(match: Match) -> bool:
    return match.type("x").dtype == match.type("y").dtype


_WRONG: dict[str, tuple[Rule, str]] = {
    "value": (rule(lambda x: torch.sin(x), lambda x: torch.cos(x)), "to equal"),
    "value, rounding allowed": (
        rule(lambda x: torch.sin(x), lambda x: x - x**3 / 6, exact=False),
        "error of at most",
    ),
    "dtype": (rule(lambda x: torch.sin(x), lambda x: torch.sin(x.double())), "of type"),
    "dtype of integers only": (rule(lambda x: x / 1, lambda x: x.mul(1)), "of type"),
    "shape": (rule(lambda x: torch.sin(x), lambda x: torch.sin(x).unsqueeze(0)), "of type"),
    "stride": (
        rule(lambda x: torch.sin(x), lambda x: torch.sin(x).contiguous().clone(
            memory_format=torch.contiguous_format)),
        "stride",
    ),
    "gradient": (rule(lambda x: torch.sin(x), lambda x: torch.sin(x).detach()), "requires_grad"),
    "gradient's value": (
        rule(lambda x: torch.sin(x), lambda x: torch.sin(x.detach()) + (x - x)),
        "gradients",
    ),
    "NaN and Inf": (rule(lambda x: x - x, lambda x: torch.zeros_like(x) * x.sign()), "to equal"),
    "sign of zero": (rule(lambda x: 1 / (x + 0), lambda x: 1 / x), "to equal"),
    "broadcasting": (
        rule(lambda x, y: torch.maximum(x, torch.full_like(y, -100)), lambda x, y: x.clone(),
             where=_of_same_dtype, finite_only=True),
        "of type",
    ),
    "integers": (
        rule(lambda x: torch.div(x, 2, rounding_mode="floor"), lambda x: x // 2 + (x % 2) * 0.0),
        "to be",
    ),
    "integers, value": (
        rule(lambda x: torch.div(x, 2, rounding_mode="floor"),
             lambda x: torch.div(x, 2, rounding_mode="trunc"), where=_integers_only),
        "to equal",
    ),
    "empty": (
        rule(lambda x: x.sum(), lambda x: x.sum() + x.amax() * 0, finite_only=True, exact=False),
        "it raises amax(): Expected reduction dim",
    ),
    "writes to an operand": (
        rule(lambda x: x.sign(), lambda x: x.sign_(), where=_integers_only), "outputs"
    ),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", sorted(_WRONG))
def test_wrong_rule_is_caught(kind: str) -> None:
    wrong, message = _WRONG[kind]
    with pytest.raises(NumericsError) as caught:
        prove(wrong)
    assert message in str(caught.value)


def test_right_rule_is_proven_on_many_inputs() -> None:
    assert prove(rule(lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(x))) == 60


def test_rule_that_accepts_nothing_proves_nothing() -> None:
    never = rule(lambda x: torch.sin(x), lambda x: torch.cos(x), where=lambda match: False)
    with pytest.raises(RewriteError, match="got none in"):
        prove(never)


def test_rule_that_accepts_nothing_says_why_it_refused_the_last_inputs() -> None:
    plain = (lambda x: torch.sin(x), lambda x: torch.cos(x))
    never = rule(*plain, where=lambda match: f"%{match.root.name} is a sine")
    with pytest.raises(RewriteError, match="of the last: all 1 operations matched, but %sin is a"):
        prove(never)
    wide = rule(*plain, where={"x": operand(rank=9)})
    with pytest.raises(RewriteError, match="of the last: expected rank 9 for 'x', got "):
        prove(wide)


def test_rule_may_exclude_what_is_not_finite() -> None:
    zero = (lambda x: x - x, lambda x: torch.zeros_like(x))
    with pytest.raises(NumericsError):
        prove(rule(*zero, exact=False))
    # 0 * x keeps the gradient's path.
    finite = rule(lambda x: x - x, lambda x: x * 0, finite_only=True, exact=False)
    assert prove(finite)


def test_proof_needs_operators_of_aten() -> None:
    custom = rule(lambda x: F.softsign(x), lambda x: x / (1 + x.abs()))
    with pytest.raises(RewriteError, match="expected a pattern of ATen operators"):
        prove(custom)


def test_pattern_module_computes_the_pattern() -> None:
    found = rule(lambda x, dim: torch.softmax(x, dim), lambda x, dim: x)
    x = torch.randn(2, 3)
    module = pattern_module(found, {"x": x, "dim": -1})
    result, operand = module(x)
    assert torch.equal(operand, x)
    torch.testing.assert_close(result, torch.softmax(x, -1))


def _add_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1).mul(2)


_PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "argument written": (_add_in_place, lambda x: (x + 1) * 2, "arguments"),
    "argument not written": (lambda x: (x + 1) * 2, _add_in_place, "arguments"),
    "other structure": (lambda x: (x, x), lambda x: [x, x], "outputs of the form"),
    "fewer results": (lambda x: (x, x), lambda x: (x,), "outputs of the form"),
    "Python value": (lambda x: (x, 3), lambda x: (x, 4), "to be 3, got 4"),
    "Python type": (lambda x: (x, 3), lambda x: (x, 3.0), "to be 3, got 3.0"),
    "dtype": (lambda x: x, lambda x: x.half(), "f16"),
    "layout": (lambda x: x + 1, lambda x: (x.t() + 1).contiguous().t(), "stride"),
    "second result": (lambda x: (x, x + 1), lambda x: (x, x + 1.01), "outputs[1]"),
}


@pytest.mark.parametrize("kind", sorted(_PROGRAMS))
def test_different_programs_are_told_apart(kind: str) -> None:
    before, after, message = _PROGRAMS[kind]
    with pytest.raises(NumericsError) as caught:
        assert_equivalent(before, after, (torch.randn(3, 4),))
    assert message in str(caught.value)
    assert_equivalent(before, before, (torch.randn(3, 4),))


def test_gradients_are_compared_when_an_input_requires_them() -> None:
    def before(x: torch.Tensor) -> torch.Tensor:
        return x * x

    def after(x: torch.Tensor) -> torch.Tensor:
        return x * x.detach()

    assert_equivalent(before, after, (torch.randn(3),))
    with pytest.raises(NumericsError, match="gradients"):
        assert_equivalent(before, after, (torch.randn(3, requires_grad=True),))
    assert_equivalent(before, after, (torch.randn(3, requires_grad=True),), gradients=False)


def test_no_gradient_is_a_gradient_of_zero() -> None:
    def before(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y * 0

    def after(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 0

    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    for exact in (False, True):
        assert_equivalent(before, after, (x, y), exact=exact)
        assert_equivalent(after, before, (x, y), exact=exact)
    with pytest.raises(NumericsError, match=r"gradients\[1\]"):
        assert_equivalent(lambda x, y: x + y * 0.5, lambda x, y: x + y.detach() * 0.5, (x, y))


def test_complex_numbers_are_compared() -> None:
    x = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    for exact in (False, True):
        assert_equivalent(lambda x: x * 2, lambda x: x + x, (x,), exact=exact)
        with pytest.raises(NumericsError, match="outputs"):
            assert_equivalent(lambda x: x * 2, lambda x: x + x.conj(), (x,), exact=exact)
        with pytest.raises(NumericsError, match="gradients"):
            assert_equivalent(lambda x: x * 2, lambda x: x + x.detach(), (x,), exact=exact)


def test_the_largest_number_is_not_infinity() -> None:
    large = torch.finfo(torch.float32).max
    with pytest.raises(NumericsError, match="to equal"):
        assert_equivalent(
            lambda x: x * large, lambda x: x * torch.inf, (torch.ones(1),), exact=True
        )


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, lambda x: x.conj().imag])
def test_copies_of_lazy_inputs_have_their_values(lazy: Callable[..., Any]) -> None:
    x = lazy(torch.randn(3, dtype=torch.complex64))
    assert_equivalent(lambda x: x + 0, lambda y: x + 0, (x,), exact=True)


def test_random_programs_see_the_same_generator() -> None:
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    assert_equivalent(noise, lambda x: torch.rand_like(x) + x, (torch.randn(5),))


def test_inputs_are_left_as_they_were() -> None:
    x = torch.zeros(3)
    assert_equivalent(_add_in_place, _add_in_place, (x,))
    assert torch.equal(x, torch.zeros(3))


def test_keyword_inputs_reach_both_programs() -> None:
    def scaled(x: torch.Tensor, *, by: float) -> torch.Tensor:
        return x * by

    assert_equivalent(scaled, lambda x, by: by * x, (torch.ones(2),), {"by": 3.0})


def test_exact_refuses_what_rounding_allows() -> None:
    x = (torch.randn(1000),)

    def twice(value: torch.Tensor) -> torch.Tensor:
        return torch.exp(value) * torch.exp(-value) * value

    def once(value: torch.Tensor) -> torch.Tensor:
        return value * 1

    assert_equivalent(twice, once, x)
    with pytest.raises(NumericsError):
        assert_equivalent(twice, once, x, exact=True)


def test_errors_are_measured_against_the_largest_value() -> None:
    exact = torch.tensor([1.0, 100.0], dtype=torch.float64)
    measured = compare(torch.tensor([1.0, 101.0]), torch.tensor([1.5, 100.0]), exact)
    assert measured.error == pytest.approx(0.01)
    assert measured.eager_error == pytest.approx(0.005)
    assert measured.is_within(torch.float32)
    nan = compare(torch.tensor([torch.nan, 100.0]), exact.float(), exact)
    assert not nan.is_within(torch.float32)


def test_rewriting_by_example() -> None:
    square = rule(lambda x: x * x, lambda x: torch.square(x))
    assert_rewrites(square, lambda a: torch.relu(a) * torch.relu(a) + a * a,
                    lambda a: torch.relu(a) * torch.relu(a) + torch.square(a))  # fmt: skip
    assert_rewrites(square, lambda a, b: a * b, None)
    with pytest.raises(RewriteError, match="to leave it alone"):
        assert_rewrites(square, lambda a: a * a, None)
    with pytest.raises(RewriteError, match="expected\ngraph"):
        assert_rewrites(square, lambda a: a * a, lambda a: a + a)
