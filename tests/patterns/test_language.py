"""The words of the pattern language: alternatives, optional operations, chains, names, operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import PatternError
from fxkit.ir.printer import format_graph
from fxkit.patterns import any_of, computed, named, operand, optional, pattern, repeated
from fxkit.patterns.engine import find, rewrite


def traced(function):
    return fxkit.symbolic_trace(function)


def roots(function, wanted):
    return [match.root.name for match in find(traced(function), wanted)]


def model(x):
    return (F.gelu(x) + 1) * (1 + x.relu()) * (x.exp() + 1)


def test_any_of_matches_each_alternative_in_every_spelling():
    wanted = pattern(lambda x: any_of(torch.relu, F.gelu)(x) + 1)
    assert roots(model, wanted) == ["add", "add_1"]


def test_any_of_at_the_root():
    wanted = pattern(lambda x: any_of(torch.relu, torch.exp)(x))
    assert set(wanted.root_operators) == {"aten.relu", "aten.exp"}
    assert roots(model, wanted) == ["relu", "exp"]


def test_any_of_goes_on_to_the_next_when_the_rest_fails():
    wanted = pattern(lambda x, y: any_of(lambda v: v, torch.neg)(x) * y + x)
    assert roots(lambda x, y: -x * y + x, wanted) == ["add"]


def test_optional_matches_with_and_without():
    wanted = pattern(lambda x, s: torch.softmax(optional(lambda v: v * s)(x @ x), -1))
    found = find(
        traced(lambda x: torch.softmax(x @ x, -1) + torch.softmax((x @ x) * 3, -1)), wanted
    )
    assert [match.bindings.get("s") for match in found] == [None, 3]


def test_optional_root_is_refused():
    with pytest.raises(PatternError, match="ends in an operation"):
        pattern(lambda x: optional(torch.neg)(x)).root_operators  # noqa: B018


def test_repeated_takes_the_longest_chain():
    rule = fxkit.rule(
        lambda x: repeated(torch.relu, at_least=2)(x), lambda x: torch.relu(x), name="relus"
    )
    gm = traced(lambda x: torch.relu(F.relu(x.relu().relu())) + torch.relu(x).exp())
    report = rewrite(gm, rule)
    assert format_graph(gm).count("aten.relu") == 2
    x = torch.randn(5)
    assert torch.equal(gm(x), torch.relu(x) + torch.relu(x).exp())
    assert report.count >= 1


def test_repeated_respects_its_bounds():
    chain = traced(lambda x: x.relu().relu().relu())
    count = {}
    for low, high in ((3, 64), (4, 64), (1, 1)):
        count[low, high] = len(find(chain, _chain(low, high)))
    assert count == {(3, 64): 1, (4, 64): 0, (1, 1): 3}


def _chain(low, high):
    def relus(x):
        return repeated(torch.relu, low, high)(x)

    return relus


def test_repeated_with_another_operand():
    wanted = pattern(lambda x, s: repeated(lambda v: v * s, at_least=2)(x))
    assert roots(lambda x, s: x * s * s, wanted) == ["mul_1"]
    assert roots(lambda x, s: x * s * 2, wanted) == []


def test_named_binds_an_interior_value():
    def f(x):
        return named(torch.exp(x), "e") * 2

    match = find(traced(lambda x: 2 * x.exp()), f)[0]
    assert match["e"].name == "exp"


def two_uses(x):
    e = torch.exp(x)
    return e * 2, e


def test_interior_value_may_escape_only_when_the_rule_says_so():
    def before(x):
        return named(torch.exp(x), "e") * 2

    def after(x):
        return torch.exp(x) + torch.exp(x)

    strict = fxkit.rule(before, after, name="strict")
    assert rewrite(traced(two_uses), strict).count == 0
    gm = traced(two_uses)
    assert rewrite(gm, fxkit.rule(before, after, name="lax", may_escape=("e",))).count == 1
    x = torch.randn(4)
    for got, expected in zip(gm(x), two_uses(x), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("names", [("f",), "e_", ("e", "gate")])
def test_what_may_escape_has_a_name(names: Any):
    with pytest.raises(PatternError, match="expected may_escape to name values of sines, got '"):
        fxkit.rule(
            lambda x: named(torch.exp(x), "e").sin(),
            lambda x: torch.exp(x).cos(),
            name="sines",
            may_escape=names,
        )


def typed(function, *args):
    gm = traced(function)
    propagate_types(gm, args)
    return gm


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (operand(dtype=torch.float32), ["mul", "mul_2"]),
        (operand(dtype=[torch.int64, torch.int32]), ["mul_1"]),
        (operand(floating=True), ["mul", "mul_2"]),
        (operand(rank=1), ["mul_2"]),
        (operand(shape=(2, None)), ["mul", "mul_1"]),
        (operand(device="cuda"), []),
        (operand(unless=F.relu), ["mul", "mul_1"]),
        (operand(only_use=True), ["mul_1", "mul_2"]),
        (operand(constant=True), []),
    ],
)
def test_operand_demands(demand, expected):
    def f(x, y, z):
        return x * 2, y * 2, torch.relu(z) * 2, x + 1

    gm = typed(f, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64), torch.ones(3))
    wanted = pattern(lambda v: v * 2, {"v": demand})
    assert [match.root.name for match in find(gm, wanted)] == expected


def test_operand_by_value():
    wanted = pattern(lambda x, n: x * n, {"n": operand(constant=True, value=lambda n: n > 2)})
    assert roots(lambda x: x * 2 + x * 3 + x * x, wanted) == ["mul_1"]


def test_demand_on_no_capture_is_refused():
    with pytest.raises(PatternError, match="expected captures among x, got y"):
        pattern(lambda x: x * 2, {"y": operand(rank=1)})


def test_demand_and_predicates_together_give_their_reason():
    rule = fxkit.rule(
        lambda x: x * 2,
        lambda x: x + x,
        where=[{"x": operand(rank=2)}, lambda m: True, lambda m: "not today"],
        name="doubled",
    )
    gm = typed(lambda x, y: x * 2 + y * 2, torch.ones(2, 2), torch.ones(2))
    assert "but not today" in str(fxkit.explain(gm, rule, at="mul"))
    assert "expected rank 2 for 'x', got f32[2] on cpu" in str(fxkit.explain(gm, rule, at="mul_1"))


def test_untyped_operand_says_what_to_do():
    rule = fxkit.rule(lambda x: x * 2, lambda x: x + x, where={"x": operand(rank=2)}, name="r")
    text = str(fxkit.explain(traced(lambda x: x * 2), rule))
    assert "got a value of unknown type: call propagate_types first" in text


def test_list_operand_is_captured_whole():
    match = find(traced(lambda x, y: torch.cat([x, y, x], dim=-1)), lambda xs: torch.cat(xs, -1))[0]
    assert [node.name for node in match["xs"]] == ["x", "y", "x"]


def test_words_outside_of_a_pattern_are_refused():
    with pytest.raises(PatternError, match="expected"):
        any_of(torch.relu, torch.exp)(torch.ones(2))
    with pytest.raises(PatternError, match="expected"):
        named(torch.ones(2), "x")


def test_larger_benefit_goes_first_in_the_whole_graph():
    small = fxkit.rule(lambda x: x * 0.5, lambda x: x / 2, name="small", benefit=1)
    large = fxkit.rule(lambda x: torch.exp(x * 0.5), lambda x: torch.sqrt(torch.exp(x)),
                       name="large", benefit=2)  # fmt: skip
    report = rewrite(traced(lambda x: torch.exp(x * 0.5) + x * 0.5), [small, large])
    assert report.hits == {"large": 1, "small": 1}


def test_of_equal_benefit_the_larger_match_wins_and_the_other_is_reported():
    outer = fxkit.rule(lambda x: torch.exp(x) + 1, lambda x: torch.expm1(x) + 2, name="outer")
    inner = fxkit.rule(lambda x: x + 1, lambda x: x - -1, name="inner")
    report = rewrite(traced(lambda x: torch.exp(x) + 1), [inner, outer])
    assert report.hits["outer"] == 1
    assert ("inner", "add", "outer was taken there") in report.refusals
    assert "not rewritten: inner at %add: outer was taken there" in report.table()


def test_refused_match_is_tried_again_when_its_other_user_is_gone():
    pair = fxkit.rule(
        lambda x: torch.exp(x) * 2, lambda x: torch.exp(x) + torch.exp(x), name="pair"
    )
    drop = fxkit.rule(lambda x, y: torch.maximum(x, x) * y, lambda x, y: x * y, name="drop")

    def f(x, y):
        e = torch.exp(x)
        return e * 2, torch.sub(e, e) * y

    zero = fxkit.rule(lambda e, y: torch.sub(e, e) * y, lambda e, y: y * 0, name="zero")
    report = rewrite(traced(f), [pair, drop, zero])
    assert report.hits == {"pair": 1, "zero": 1}


def test_computed_constants_know_what_was_left_out():
    rule = fxkit.rule(
        lambda x, s: torch.exp(optional(lambda v: v * s)(x)),
        lambda x, s: torch.exp2(x * computed(lambda s: 10 if s is None else s + 1)(s)),
        name="scaled",
    )
    gm = traced(lambda x: torch.exp(x * 3) + torch.exp(x))
    assert rewrite(gm, rule).count == 2
    assert [node.args[1] for node in gm.graph.nodes if node.name.startswith("mul")] == [4, 10]
    assert "computation" not in format_graph(gm)


def test_computed_outside_of_a_replacement_is_refused():
    with pytest.raises(PatternError, match="expected"):
        computed(abs)(3)
