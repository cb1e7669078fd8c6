"""Counterexamples to rules: small, in words and as a script that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxkit.errors import CounterexampleError, NumericsError
from fxkit.ir.types import TensorType
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Rule, rule
from fxkit.testing import prove


def refuted(wrong: Rule) -> CounterexampleError:
    with pytest.raises(CounterexampleError) as caught:
        prove(wrong)
    return caught.value


SIN_TO_COS = rule(lambda x: torch.sin(x), lambda x: torch.cos(x), name="sin_to_cos")


def test_it_is_shrunk_to_the_rule_itself() -> None:
    text = str(refuted(SIN_TO_COS))
    assert text.startswith("sin_to_cos changes the result: expected outputs[0] to equal [0.0]")
    assert "%sin: f32[1,1] = aten.sin(%x)\n           return (%sin)" in text
    assert "hint:  inputs: x=f32[1,1] stride (1, 1) [[0.0]]" in text


def _wide(match: Match) -> bool:
    known = match.type("x")
    return isinstance(known, TensorType) and len(known.shape) == 2 and known.shape[-1] > 1


def _integer(match: Match) -> bool:
    known = match.type("x")
    return isinstance(known, TensorType) and known.dtype in (torch.int64, torch.int32)


SHRUNK: dict[str, tuple[Rule, str]] = {
    "what the rule demands stays": (
        rule(lambda x: torch.exp(x), lambda x: torch.exp(x) + 1, where=_wide),
        "x=f32[1,2]",
    ),
    "an integer type stays": (
        rule(lambda x: torch.neg(x), lambda x: torch.neg(x) - 1, where=_integer),
        "x=i",
    ),
    "float16 and NaN do not": (
        rule(lambda x: x * 1, lambda x: x * 2, exact=False),
        "x=f32[1,1] stride (1, 1) [[1.0]]",
    ),
    "strides stay where they matter": (
        rule(lambda x: torch.tanh(x), lambda x: torch.tanh(x).clone(
            memory_format=torch.contiguous_format)),
        "x=f32[2,2] stride (1, 2)",
    ),
    "gradients stay where they matter": (
        rule(lambda x: torch.tanh(x), lambda x: torch.tanh(x.detach()) + (x - x)),
        "requires_grad",
    ),
    "NaN stays where it matters": (
        rule(lambda x: torch.relu(x), lambda x: torch.where(x > 0, x, x.new_zeros(()))),
        "nan",
    ),
    "constants are named": (
        rule(lambda x, dim: torch.softmax(x, dim), lambda x, dim: torch.softmax(x * 2, dim)),
        "dim=0",
    ),
    "operands that need not differ are one": (
        rule(lambda x, y: torch.add(x, y), lambda x, y: torch.sub(x, y)),
        "inputs: x=f32[1,1] stride (1, 1) [[1.0]]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(SHRUNK))
def test_what_matters_stays(kind: str) -> None:
    wrong, shown = SHRUNK[kind]
    error = refuted(wrong)
    assert shown in (error.hint or "")
    assert (error.node or "").count("aten") <= 2


def test_the_code_runs_the_rule_where_it_can_be_imported() -> None:
    code = refuted(SIN_TO_COS).code
    assert "SIN_TO_COS" in code
    assert_fails(code)


def test_the_code_has_the_rewritten_program_otherwise() -> None:
    code = refuted(rule(lambda x: torch.sin(x), lambda x: torch.cos(x))).code
    assert "build_rewritten" in code and "import fxkit\n" not in code
    assert_fails(code)


def assert_fails(code: str) -> None:
    with pytest.raises(NumericsError, match=r"expected outputs.0. to equal .0.0."):
        exec(code, {"__name__": "__main__"})


def test_nothing_is_written_while_a_rule_is_refuted(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def program(x: Any) -> Any:
        return x.sum() + x.amax() * 0

    raising = rule(lambda x: x.sum(), program, finite_only=True, exact=False)
    assert "it raises" in str(refuted(raising))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_an_operator_of_this_process_alone_is_told_without_a_script() -> None:
    library = torch.library.Library("fxkit_alone", "DEF")
    library.define("halved(Tensor x) -> Tensor")
    library.impl("halved", lambda x: x / 2, "CompositeImplicitAutograd")
    halve = torch.ops.fxkit_alone.halved.default
    wrong = rule(lambda x: torch.sin(x), lambda x: halve(x), name="halves")
    error = refuted(wrong)
    assert "halves changes the result" in str(error)
    assert error.code is not None
    assert error.code.startswith("# no script of its own: expected an operator that a new process")
