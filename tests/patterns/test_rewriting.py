"""A rule that says where it matches is followed when a graph has such an operator, not before."""

from __future__ import annotations

import copy
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.errors import PatternError
from fxkit.patterns.importers import from_replace_pattern
from fxkit.patterns.language import optional
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.rules import RULES


def _counted(at: Any) -> tuple[Rule, list[str]]:
    """Return a rule that turns neg of neg into what was negated, and how often it was followed."""
    followed: list[str] = []

    @fxkit.rule(at=at)
    def negations(x):
        """Two negations cancel."""
        followed.append("negations")
        return torch.neg(torch.neg(x)), x

    return negations, followed


def test_a_rule_is_followed_once_and_only_for_a_graph_with_its_operator() -> None:
    negations, followed = _counted("aten.neg")
    assert fxkit.rewrite(fxkit.symbolic_trace(lambda x: x.sin().cos()), negations).count == 0
    assert (negations.name, negations.doc, followed) == ("negations", "Two negations cancel.", [])
    assert negations.file == __file__
    for _ in range(2):
        gm = fxkit.symbolic_trace(lambda x: x.neg().neg().sin())
        assert fxkit.rewrite(gm, [negations]).count == 1
        assert [node.name for node in gm.graph.nodes] == ["x", "sin", "output"]
    assert followed == ["negations"]


def test_a_rule_is_followed_when_another_one_makes_its_operator() -> None:
    negations, followed = _counted(("aten.neg",))
    twice = fxkit.rule(lambda x: torch.sin(x), lambda x: torch.neg(torch.neg(x)), at="aten.sin")
    gm = fxkit.symbolic_trace(lambda x: x.sin().cos())
    assert fxkit.rewrite(gm, [negations, twice]).count == 2
    assert followed
    assert [node.name for node in gm.graph.nodes] == ["x", "cos", "output"]


@pytest.mark.parametrize("at", ["aten.sin", ("aten.neg", "aten.sin")])
def test_a_rule_that_says_another_place_is_refused_when_it_is_used(at: Any) -> None:
    negations, _ = _counted(at)
    with pytest.raises(PatternError, match=r"expected negations to say at=\('aten.neg',\)"):
        fxkit.find(fxkit.symbolic_trace(lambda x: x.sin()), negations)


def test_what_is_wrong_in_a_rule_is_told_when_it_is_used() -> None:
    one_sided = fxkit.rule(lambda x: torch.neg(x), at="aten.neg", name="one_sided")
    with pytest.raises(PatternError, match="to return"):
        fxkit.rewrite(fxkit.symbolic_trace(lambda x: -x), one_sided)


@pytest.mark.parametrize(
    "after",
    [lambda x, y: torch.sin(x) + y, lambda x, y: y, lambda x, y: torch.cat([x, y])],
)
def test_a_replacement_takes_only_what_the_pattern_uses(after: Any) -> None:
    refused = pytest.raises(PatternError, match="the pattern exponential computes with, got y")
    with refused:
        fxkit.rule(lambda x, y: torch.exp(x), after, name="exponential")
    with refused:
        fxkit.rule(lambda x, y: (torch.exp(x), after(x, y)), name="exponential")
    with pytest.raises(PatternError, match="got y"):
        from_replace_pattern([(lambda x, y: torch.exp(x), after)])
    late = fxkit.rule(lambda x, y: torch.exp(x), after, name="exponential", at="aten.exp")
    with refused:
        fxkit.rewrite(fxkit.symbolic_trace(lambda x: torch.exp(x)), late)


_WEIGHT, _LAYER, _ACTIVATION = torch.ones(3), torch.nn.Linear(3, 3), torch.nn.ReLU()
_OWN_VALUES = [
    lambda x: torch.sin(x) * _WEIGHT,
    lambda x: _LAYER(x),
    lambda x: torch.sin(_ACTIVATION(x)),
    lambda x: torch.sin(x) + _LAYER.weight,
]


@pytest.mark.parametrize("own", _OWN_VALUES)
def test_neither_side_of_a_rule_reads_a_tensor_or_module_of_its_own(own: Any) -> None:
    def plain(x):
        return torch.exp(x)

    with pytest.raises(PatternError, match="replacement of operations on its parameters") as after:
        fxkit.rule(plain, own)
    assert "add_attribute" in str(after.value)
    assert "test_rewriting.py" in str(after.value)
    with pytest.raises(PatternError, match="expected operations on the parameters"):
        fxkit.rule(own, plain)
    with pytest.raises(PatternError, match="replacement of operations"):
        from_replace_pattern([(plain, own)])
    with pytest.raises(PatternError, match="replacement of operations"):
        fxkit.rule(lambda x: (torch.exp(x), own(x)))


def test_what_a_rule_can_not_add_an_edit_can() -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.exp(x))
    with fxkit.edit(gm) as e:
        for match in fxkit.find(gm, lambda x: torch.exp(x)):
            weight = e.add_attribute("weight", _WEIGHT)
            e.replace(match.root, e.call(torch.mul, match["x"], weight, before=match.root))
    assert torch.equal(gm(2 * _WEIGHT), 2 * _WEIGHT)


def test_a_parameter_that_neither_side_uses_is_fine() -> None:
    unused = fxkit.rule(lambda x, y: torch.exp(x), lambda x, y: torch.sin(x), exact=False)
    gm = fxkit.symbolic_trace(lambda x: torch.exp(x))
    assert fxkit.rewrite(gm, unused).count == 1


def test_an_optional_operand_that_was_left_out_goes_only_where_none_may_stand() -> None:
    scaled = fxkit.rule(
        lambda x, s: torch.tanh(optional(lambda t: t * s)(x)),
        lambda x, s: torch.sin(x) + s,
        exact=False,
    )
    gm = fxkit.symbolic_trace(lambda x: torch.tanh(x))
    report = fxkit.rewrite(gm, scaled)
    assert report.count == 0
    assert "takes no None for 's'" in str(report.refusals)
    gm = fxkit.symbolic_trace(lambda x: torch.tanh(x * 2))
    assert fxkit.rewrite(gm, scaled).count == 1
    assert torch.equal(gm(torch.ones(2)), torch.ones(2).sin() + 2)
    layer = fxkit.rule(
        lambda x, w, b: torch.relu(F.linear(x, w, b)),
        lambda x, w, b: torch.tanh(F.linear(x, w, b)),
        exact=False,
    )
    gm = fxkit.symbolic_trace(lambda x, w: torch.relu(F.linear(x, w)))
    assert fxkit.rewrite(gm, layer).count == 1


def test_a_rule_that_is_not_followed_yet_can_be_copied_and_changed() -> None:
    negations, _ = _counted("aten.neg")
    assert not hasattr(negations, "roots")
    copied, better = copy.copy(negations), replace(negations, benefit=3)
    assert copied.pattern.root_operators == ("aten.neg",)
    assert (better.benefit, better.at, len(better.pattern)) == (3, ("aten.neg",), 2)


@pytest.mark.parametrize("name", list(RULES))
def test_each_rule_says_where_it_matches(name: str) -> None:
    found = RULES[name]
    assert set(found.at) == set(found.pattern.root_operators)


_ONE_PASS = """
import torch, fxkit
from fxkit.patterns.rules import RULES
gm = fxkit.symbolic_trace(lambda x: torch.relu(torch.relu(x)).flatten())
fxkit.PassManager([fxkit.passes.Canonicalise()]).run(gm)
print(len(gm.graph.nodes), *[name for name, rule in RULES.items() if "pattern" in vars(rule)])
"""


def test_a_pass_follows_the_rules_of_the_operators_that_are_there(
    bare_python: list[str],
) -> None:
    done = subprocess.run(
        [*bare_python, "-c", _ONE_PASS], capture_output=True, text=True, check=True
    )
    count, *followed = done.stdout.split()
    roots = {operator for name in followed for operator in RULES[name].at}
    assert int(count) == 4
    assert {"relu_of_relu", "flatten_to_same"} <= set(followed)
    assert all(set(RULES[name].at) & {"aten.relu", "aten.flatten"} for name in followed), roots
