"""The texts that tell why a rule did not apply."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxkit.errors import FxkitError
from fxkit.patterns.language import any_of
from fxkit.patterns.reasons import explain
from fxkit.patterns.rewriting import rule
from fxkit.patterns.templates import pattern
from fxkit.tracing.symbolic import symbolic_trace

_SILU = rule(lambda x: x * torch.sigmoid(x), lambda x: F.silu(x), name="silu")


def _text(explanation: object) -> str:
    return re.sub(r":\d+ in \S+", ":LINE", str(explanation))


def test_another_operator() -> None:
    gm = symbolic_trace(lambda a: a * torch.tanh(a))
    assert _text(explain(gm, _SILU, at="mul")) == (
        "silu does not apply at %mul\n"
        "silu at %mul: 1 of 2 operations matched\n"
        "expected aten.sigmoid, got aten.tanh\n"
        "  node:  %tanh = aten.tanh(%a)\n"
        "  from:  test_reasons.py:LINE\n"
        "  rule:  test_reasons.py:LINE"
    )


def test_the_same_operator_in_place() -> None:
    gm = symbolic_trace(lambda a: F.relu(a + 1, inplace=True))
    assert _text(explain(gm, lambda x: F.relu(x))) == (
        "<lambda> does not match\n"
        "expected aten.relu somewhere in the graph, got aten.relu_, which writes in place: run "
        "fxkit.passes.Functionalise() before, or write the pattern so too\n"
        "  node:  %relu = aten.relu_(%add)\n"
        "  from:  test_reasons.py:LINE"
    )
    gm = symbolic_trace(lambda a: F.relu(a + 1))
    assert "got aten.relu, which" in explain(gm, lambda x: F.relu_(x)).reason


def test_another_operand() -> None:
    gm = symbolic_trace(lambda a, b: torch.sigmoid(a) * b)
    assert _text(explain(gm, _SILU)) == (
        "silu does not apply at %mul\n"
        "silu at %mul: 2 of 2 operations matched\n"
        "expected %b again for 'x', got %a\n"
        "  node:  %sigmoid = aten.sigmoid(%a)\n"
        "  from:  test_reasons.py:LINE\n"
        "  rule:  test_reasons.py:LINE"
    )


def test_another_constant() -> None:
    scaled = rule(lambda x, y: torch.add(x, y), lambda x, y: x, name="plain_sum")
    gm = symbolic_trace(lambda a, b: torch.add(a, b, alpha=5))
    assert _text(explain(gm, scaled)) == (
        "plain_sum does not apply at %add\n"
        "plain_sum at %add: 1 of 1 operations matched\n"
        "expected 1 for 'alpha', got 5\n"
        "  node:  %add = aten.add(%a, %b, alpha=5)\n"
        "  from:  test_reasons.py:LINE\n"
        "  rule:  test_reasons.py:LINE"
    )


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip() == text)


def test_no_such_root() -> None:
    gm = symbolic_trace(lambda a: torch.sigmoid(a))
    explanation = explain(gm, _SILU)
    assert (explanation.applies, explanation.node) == (False, None)
    assert str(explanation) == (
        "silu does not apply\nexpected aten.mul somewhere in the graph, got none"
    )


_SINE = "gm = symbolic_trace(lambda a: torch.sin(a))"


def test_the_predicate_says_why() -> None:
    never = rule(lambda x: torch.sin(x), lambda x: x, name="never", where=lambda match: "too small")
    gm = symbolic_trace(lambda a: torch.sin(a))
    assert str(explain(gm, never)) == (
        "never does not apply at %sin\n"
        "all 1 operations matched, but too small\n"
        "  node:  %sin = aten.sin(%a)\n"
        f"  from:  test_reasons.py:{_line_of(_SINE)} in <lambda>"
    )


def test_effects_say_why() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(a)
        a.add_(1)
        return a * gate

    explanation = explain(symbolic_trace(program), _SILU)
    assert str(explanation) == (
        "silu does not apply at %mul\n"
        "all 2 operations matched, but %add_ may write to %a before %mul\n"
        "  node:  %mul = aten.mul(%a, %sigmoid)\n"
        f"  from:  test_reasons.py:{_line_of('return a * gate')} in program\n"
        "  node:  %add_ = aten.add_(%a, 1)\n"
        f"  from:  test_reasons.py:{_line_of('a.add_(1)')} in program"
    )


def test_what_applies_tells_what_it_matched() -> None:
    gm = symbolic_trace(lambda a: torch.sigmoid(a) * a)
    explanation = explain(gm, _SILU)
    assert explanation.applies
    assert str(explanation) == "silu applies at %mul\nsilu at %mul (x=%a)"


def test_the_nearest_of_several_is_told() -> None:
    gm = symbolic_trace(lambda a, b: (a * b) + a * torch.sigmoid(b))
    explanation = explain(gm, _SILU)
    assert explanation.node == "mul_1"
    assert explanation.miss is not None and explanation.miss.matched == 2


def _strided(x, w, b):
    return F.relu(F.conv2d(x, w, b, stride=1))


def test_an_argument_is_told_by_its_name() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1, stride=2), torch.nn.ReLU())
    miss = explain(symbolic_trace(module), _strided).miss
    assert miss is not None and (miss.expected, miss.got) == ("1 for 'stride'", "2")


def test_nodes_of_which_as_much_matched_are_all_told() -> None:
    convolutions = [torch.nn.Conv2d(3, 3, 1, **kind) for kind in ({"stride": 2}, {"padding": 1})]
    layers = [layer for each in convolutions for layer in (each, torch.nn.ReLU())]
    explanation = explain(symbolic_trace(torch.nn.Sequential(*layers, torch.nn.ReLU())), _strided)
    first, second = explanation, *explanation.ties
    assert "expected 1 for 'stride', got 2" in first.reason
    assert str(first).endswith(f"as near at %{second.node}: expected 0 for 'padding', got 1")
    gm = symbolic_trace(lambda a: [torch.relu(a) * n for n in range(6)])
    assert str(explain(gm, _SILU)).endswith("as near at 2 more nodes")


def test_unknown_node() -> None:
    with pytest.raises(FxkitError, match="expected the name of a node, got 'nowhere'"):
        explain(symbolic_trace(lambda a: a * 2), _SILU, at="nowhere")


def _gated(x, y):
    return any_of(torch.sigmoid, torch.tanh)(x) * y


def test_a_pattern_alone_can_be_asked_for() -> None:
    gm = symbolic_trace(lambda a, b: torch.relu(a) * torch.relu(b))
    for wanted in (_gated, pattern(_gated)):
        assert _text(explain(gm, wanted)) == (
            "_gated does not match at %mul\n"
            "_gated at %mul: 1 of 3 operations matched\n"
            "expected aten.sigmoid, got aten.relu\n"
            "  node:  %relu = aten.relu(%a)\n"
            "  from:  test_reasons.py:LINE\n"
            "  rule:  language.py:LINE"
        )
    gm = symbolic_trace(lambda a: a * torch.tanh(a))
    assert str(explain(gm, _gated, at="mul")) == (
        "_gated matches at %mul\n_gated at %mul (x=%a, y=%a)"
    )
    gm = symbolic_trace(lambda a: torch.tanh(a))
    assert str(explain(gm, _gated)) == (
        "_gated does not match\nexpected aten.mul somewhere in the graph, got none"
    )


@pytest.mark.parametrize("wanted", ["silu", 3, None])
def test_what_is_no_rule_and_no_pattern_is_refused(wanted: Any) -> None:
    with pytest.raises(FxkitError, match="expected rules, got"):
        explain(symbolic_trace(lambda a: a * 2), wanted)
