"""The lint of rules: each kind of bad rule set is found, and the shipped rules have none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fxkit.patterns.language import operand
from fxkit.patterns.rewriting import Rule, rule
from fxkit.patterns.rules import RULES
from fxkit.testing import Finding, lint_rules


def named(
    name: str, before: Callable[..., object], after: Callable[..., object], **options
) -> Rule:
    return rule(before, after, name=name, **options)


def negated(name: str, **options) -> Rule:
    return named(name, lambda x: -torch.neg(x), lambda x: torch.abs(x), **options)


_ALWAYS_FIRST = negated("large", benefit=2)
_DEEP = named("deep", lambda x: torch.exp(torch.log(x)), lambda x: x * 1, exact=False)
_FLAT = named("flat", lambda x: torch.exp(x), lambda x: torch.expm1(x) + 1, exact=False)

_BAD: dict[str, tuple[list[Rule], Finding]] = {
    "shadowed by benefit": (
        [negated("small"), _ALWAYS_FIRST],
        Finding("shadowed", ("small", "large"), "wherever it matches, large is taken"),
    ),
    "shadowed by the same rule": (
        [negated("first"), negated("second")],
        Finding("shadowed", ("second", "first"), "wherever it matches, first is taken"),
    ),
    "shadowed by a wider pattern": (
        [
            named("of_relu", lambda x: torch.exp(torch.relu(x)), lambda x: torch.exp(x)),
            named("of_any", lambda x: torch.exp(x), lambda x: torch.exp2(x), benefit=2),
        ],
        Finding("shadowed", ("of_relu", "of_any"), "wherever it matches, of_any is taken"),
    ),
    "contradictory demands": (
        [
            named("both", lambda x: torch.sin(x), lambda x: torch.cos(x),
                  where={"x": operand(dtype=torch.int64, floating=True)}),
        ],
        Finding(
            "never matches",
            ("both",),
            "expected operands that its demands accept, got none; give samples= if there are",
        ),
    ),
    "predicate that accepts nothing": (
        [named("never", lambda x: torch.sin(x), lambda x: torch.cos(x), where=lambda match: False)],
        Finding(
            "never matches",
            ("never",),
            "expected operands that its demands accept, got none; give samples= if there are",
        ),
    ),
    "undo each other": (
        [
            named("there", lambda x, y: x - y, lambda x, y: x + torch.neg(y)),
            named("back", lambda x, y: x + torch.neg(y), lambda x, y: x - y),
        ],
        Finding("endless", ("back", "there"), "they undo each other's results"),
    ),
    "own result": (
        [named("again", lambda x: torch.sin(x), lambda x: torch.sin(x) * 1)],
        Finding("endless", ("again",), "it matches its own result again and again"),
    ),
    "order": (
        [
            named("to_abs", lambda x: -torch.neg(x), lambda x: torch.abs(x)),
            named("to_sin", lambda x: -torch.neg(x), lambda x: torch.sin(x)),
        ],
        Finding(
            "depends on order",
            ("to_abs", "to_sin"),
            "both match 2 operations of to_abs, with other results",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(_BAD))
def test_bad_rules_are_found(kind: str) -> None:
    rules, expected = _BAD[kind]
    found = lint_rules(rules)
    assert any((f.kind, f.rules) == (expected.kind, expected.rules) for f in found), found
    assert expected.reason in {f.reason for f in found}


def test_rule_of_an_operator_that_is_none() -> None:
    misspelt = named("sine", lambda x: torch.ops.aten.sin(x), lambda x: torch.sin(x))
    operation = misspelt.pattern.operations[0]
    object.__setattr__(operation, "operator", "aten.sinus")
    (finding,) = lint_rules([misspelt])
    assert str(finding) == (
        "sine: never matches: expected operators, got aten.sinus, which torch does not have"
    )


@pytest.mark.parametrize(
    "rules",
    [
        [negated("only")],
        [_DEEP, _FLAT],
        [_FLAT, _DEEP],
        [negated("in_ints", where={"x": operand(dtype=torch.int64)}),
         named("in_floats", lambda x: -torch.neg(x), lambda x: torch.sin(x),
               where={"x": operand(floating=True)})],
    ],
)  # fmt: skip
def test_good_rules_are_left_alone(rules: list[Rule]) -> None:
    assert lint_rules(rules) == []


def test_rules_over_other_callables_are_left_out() -> None:
    assert lint_rules([rule(lambda x: torch.nn.functional.softsign(x), lambda x: x.abs())]) == []


def test_shipped_rules_have_nothing_to_mend() -> None:
    assert lint_rules([found for _, found in RULES.items()]) == []
