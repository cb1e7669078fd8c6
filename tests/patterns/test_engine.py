"""Rules applied to graphs: order, fixpoint, limits, errors, and what is recorded of it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import FxkitError, RewriteError
from fxkit.ir.printer import format_graph
from fxkit.ir.provenance import module_path, provenance_of, source_of
from fxkit.ir.types import TensorType, type_of
from fxkit.patterns import engine, rule_index
from fxkit.patterns.conditions import every
from fxkit.patterns.engine import find, rewrite
from fxkit.patterns.match_results import Match
from fxkit.patterns.reasons import explain
from fxkit.patterns.rewrite_report import RewriteReport
from fxkit.patterns.rewriting import rule
from fxkit.testing import assert_equivalent, assert_rewrites, prove
from fxkit.tracing.symbolic import symbolic_trace

_RELU = rule(lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(x), name="relu_of_relu")
_NEG = rule(lambda x: x.neg().neg(), lambda x: x, name="neg_of_neg")
_SIN = rule(lambda x: torch.sin(x), lambda x: torch.cos(x), name="sin_to_cos")


def test_rewriting_goes_on_until_nothing_matches() -> None:
    assert_rewrites(_RELU, lambda x: x.relu().relu().relu().relu(), lambda x: x.relu())
    gm = symbolic_trace(lambda x: x.relu().relu().relu().relu())
    assert rewrite(gm, _RELU).count == 3


def test_a_sweep_visits_the_nodes_as_they_were() -> None:
    chain = [rule(lambda x: torch.sin(x), lambda x: torch.cos(x)),
             rule(lambda x: torch.cos(x), lambda x: torch.tan(x))]  # fmt: skip
    gm = symbolic_trace(lambda x: torch.sin(x) + 1)
    assert rewrite(gm, chain, fixpoint=False).count == 1
    gm = symbolic_trace(lambda x: torch.sin(x) + 1)
    assert rewrite(gm, chain).count == 2
    x = torch.randn(3)
    assert torch.equal(gm(x), torch.tan(x) + 1)


def test_one_rewrite_makes_room_for_another_further_down() -> None:
    """The negations go first, and only then are the two relus neighbours."""
    gm = symbolic_trace(lambda x: torch.relu(torch.relu(x).neg().neg()) + 1)
    report = rewrite(gm, [_RELU, _NEG])
    assert [site.rule for site in report.sites] == ["neg_of_neg", "relu_of_relu"]


def test_the_rule_of_larger_benefit_wins_then_the_first() -> None:
    small = rule(lambda x: torch.exp(x), lambda x: torch.sin(x), name="small")
    large = rule(lambda x: torch.exp(x), lambda x: torch.cos(x), name="large", benefit=2)
    other = rule(lambda x: torch.exp(x), lambda x: torch.tan(x), name="other")
    for rules, expected in (
        ([small, large], "large"),
        ([small, other], "small"),
        ([other, small], "other"),
    ):
        gm = symbolic_trace(lambda x: torch.exp(x))
        assert [site.rule for site in rewrite(gm, rules).sites] == [expected]


def test_a_refused_rule_leaves_the_place_to_the_next() -> None:
    refused = rule(lambda x: torch.exp(x), lambda x: torch.sin(x), name="refused", benefit=9,
                   where=lambda match: "not today")  # fmt: skip
    taken = rule(lambda x: torch.exp(x), lambda x: torch.cos(x), name="taken")
    gm = symbolic_trace(lambda x: torch.exp(x))
    report = rewrite(gm, [refused, taken])
    assert report.hits == {"taken": 1}
    assert report.refusals == (("refused", "exp", "not today"),)


def test_overlapping_matches_are_rewritten_once() -> None:
    """The two matches of two negations share a node."""
    gm = symbolic_trace(lambda x: x.neg().neg().neg() + 1)
    assert len(find(gm, _NEG)) == 2
    assert rewrite(gm, _NEG).count == 1
    assert_equivalent(lambda x: -x + 1, gm, (torch.randn(3),), exact=True)


def test_adjacent_matches_are_both_rewritten() -> None:
    fuse = rule(lambda x: torch.exp(torch.sin(x)), lambda x: torch.cos(x))
    gm = symbolic_trace(lambda x: torch.exp(torch.sin(torch.exp(torch.sin(x)))))
    assert rewrite(gm, fuse).count == 2
    x = torch.randn(3)
    assert torch.equal(gm(x), torch.cos(torch.cos(x)))


def _text(gm: fx.GraphModule) -> tuple[str, str, list[str]]:
    return format_graph(gm, sources=True), gm.code, sorted(gm.state_dict())


CONTAINS_ITSELF = {
    "one node": rule(lambda x: torch.sin(x), lambda x: torch.sin(x) * 2),
    "two results": rule(
        lambda x: (torch.sin(x), torch.cos(x)),
        lambda x: (torch.sin(x) * 1.0, torch.cos(x) * 1.0),
    ),
    "operands in the other order": rule(lambda x: torch.tanh(x) * 2, lambda x: 2 * torch.tanh(x)),
    "inside of it": rule(lambda x: torch.sin(x), lambda x: torch.cos(torch.sin(x * 2)) * 3),
}


@pytest.mark.parametrize("name", CONTAINS_ITSELF)
def test_a_rule_is_not_applied_to_what_it_made_itself(name: str) -> None:
    endless = CONTAINS_ITSELF[name]
    gm = symbolic_trace(lambda x: (torch.sin(x), torch.cos(x), torch.tanh(x) * 2))
    report = rewrite(gm, endless)
    assert report.count == 1
    assert "not applied again to what it made itself" in str(report)


def test_a_rule_goes_on_where_what_it_made_meets_the_program() -> None:
    twice = rule(
        lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(torch.abs(torch.relu(x)))
    )
    gm = symbolic_trace(lambda x: torch.relu(torch.relu(torch.relu(x))))
    assert rewrite(gm, twice).count == 2


def test_rules_that_undo_each_other_are_applied_once() -> None:
    there = rule(lambda x: torch.sin(x), lambda x: torch.cos(x), name="there")
    back = rule(lambda x: torch.cos(x), lambda x: torch.sin(x), name="back")
    gm = symbolic_trace(lambda x: torch.sin(x) + 1)
    report = rewrite(gm, [there, back])
    assert report.hits == {"there": 1, "back": 1}
    assert (
        "there",
        "sin_1",
        "a rule is not applied again to what it made itself",
    ) in report.refusals
    assert rewrite(gm, [there, back], fixpoint=False).count == 1


def test_a_replacement_that_contains_its_pattern_works_in_one_sweep() -> None:
    scaled = rule(lambda x: torch.sin(x), lambda x: torch.sin(x * 2))
    gm = symbolic_trace(lambda x: torch.sin(torch.sin(x)))
    assert rewrite(gm, scaled, fixpoint=False).count == 2
    x = torch.randn(3)
    assert torch.equal(gm(x), torch.sin(torch.sin(x * 2) * 2))


def test_a_long_chain_is_no_endless_rule() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(300):
        value = graph.call_function(torch.relu, (value,))
    graph.output(value)
    gm = fx.GraphModule(nn.Module(), graph)
    assert rewrite(gm, _RELU).count == 299


def test_a_predicate_that_raises_is_an_error_and_nothing_has_changed() -> None:
    seen: list[str] = []

    def where(match: Match) -> bool:
        seen.append(match.root.name)
        if len(seen) == 2:
            raise KeyError("shape")
        return True

    gm = symbolic_trace(lambda x: torch.sin(torch.sin(x)))
    before = _text(gm)
    failing = rule(lambda x: torch.sin(x), lambda x: torch.cos(x), name="failing", where=where)
    with pytest.raises(RewriteError, match="predicate of failing to answer, got KeyError"):
        rewrite(gm, failing)
    assert seen == ["sin", "sin_1"]
    assert _text(gm) == before


@pytest.mark.parametrize(
    ("answer", "count"),
    [(1, 1), (torch.tensor(True), 1), ("no", 0), ("", 0), (0, 0), (None, 0), (False, 0)],
)
def test_a_predicate_answers_with_what_is_true_or_not(answer: Any, count: int) -> None:
    asked = rule(lambda x: torch.relu(x), lambda x: F.relu6(x), where=lambda match: answer)
    gm = symbolic_trace(lambda x: x.relu())
    assert len(find(gm, asked)) == count
    assert (
        rewrite(gm, [replace(asked, where=every(lambda match: answer, lambda match: True))]).count
        == count
    )


def test_a_predicate_that_returns_nothing_is_told_of() -> None:
    asked = rule(lambda x: torch.relu(x), lambda x: F.relu6(x), where=lambda match: None)
    report = rewrite(symbolic_trace(lambda x: x.relu()), asked)
    assert "returned None" in report.refusals[0][2]


_ADDMM = rule(lambda x, w, b: F.gelu(F.linear(x, w, b)),
              lambda x, w, b: F.gelu(torch.addmm(b, x, w.t())), name="addmm")  # fmt: skip
_LINEAR = rule(lambda x, w, b: F.gelu(F.linear(x, w, b)),
               lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
               name="linear")  # fmt: skip
_ADDCMUL = rule(lambda x, y, z: x * y + z, lambda x, y, z: torch.addcmul(z, x, y), name="addcmul")
_SUM = rule(lambda x, y: torch.relu(x + y), lambda x, y: torch.clamp_min(y + x, 0), name="sum")
_JOIN = rule(lambda x, y: torch.maximum(x, x) + y, lambda x, y: torch.cat([x, y]), name="join")
_ZERO = rule(lambda x: torch.sin(x) * 0, lambda x: 0.0, name="zero")
_METHOD = rule(lambda x, y: torch.sin(x) * y, lambda x, y: y.mul(torch.cos(x)), name="method")


@pytest.mark.parametrize(
    ("wanted", "program", "reason"),
    [
        (_ADDMM, lambda x, w: F.gelu(F.linear(x, w)),
         "aten.addmm of the replacement takes no None for 'b'"),
        (_LINEAR, lambda x, w: F.gelu(F.linear(x, w)), None),
        (_ADDMM, lambda x, w: F.gelu(F.linear(x, w, x[0])), None),
        (_ADDCMUL, lambda x, w: x * w + x, None),
        (_ADDCMUL, lambda x, w: x * w + 1,
         "aten.addcmul of the replacement takes no number, 1, for 'z'"),
        (_SUM, lambda x, w: torch.relu(x + 2), None),
        (_JOIN, lambda x, w: torch.maximum(x, x) + 2,
         "aten.cat of the replacement takes no number, 2, for 'y'"),
        (_METHOD, lambda x, w: torch.sin(x) * 2.0,
         "aten.mul of the replacement takes no number, 2.0, for 'y'"),
        (_ZERO, lambda x, w: w + x.sin() * 0, None),
        (_ZERO, lambda x, w: (x.sin() * 0).relu(),
         "%relu needs a tensor for %mul, not the number 0.0"),
        (_ZERO, lambda x, w: torch.sin(x) * 0 + 1,
         "%add needs a tensor for %mul, not the number 0.0"),
        (_ZERO, lambda x, w: torch.sin(x) * 0,
         "the caller needs a tensor for %mul, not the number 0.0"),
    ],
)  # fmt: skip
def test_what_the_replacement_can_not_take_is_left(wanted, program, reason) -> None:
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    gm = symbolic_trace(program)
    report = rewrite(gm, wanted)
    assert [why for _, _, why in report.refusals] == ([] if reason is None else [reason])
    assert report.count == (reason is None)
    torch.testing.assert_close(gm(x, w), program(x, w), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda gm: rewrite(gm, "neg"), "expected rules, got str"),
        (lambda gm: rewrite(gm, [_NEG, torch.relu]), "expected rules, got builtin"),
        (lambda gm: rewrite(gm, None), "expected rules, got NoneType"),
        (lambda gm: rewrite(nn.ReLU(), _NEG), "expected a torch.fx.GraphModule, got ReLU"),
        (lambda gm: find(nn.ReLU(), _NEG), "expected a torch.fx.GraphModule, got ReLU"),
        (lambda gm: find(gm, 3), "expected a function, got 3"),
        (lambda gm: find(gm, torch.relu), "got the builtin relu"),
        (lambda gm: find(gm, nn.ReLU()), "expected a function, got the module ReLU"),
        (lambda gm: explain(gm, lambda x: x), "got the parameter 'x'"),
        (lambda gm: explain(nn.ReLU(), _NEG), "expected a torch.fx.GraphModule, got ReLU"),
        (lambda gm: rule(3), "expected a function, got 3"),
        (lambda gm: rule(lambda x: x.neg(), 3), "expected a function, got 3"),
        (lambda gm: rule(lambda x: x.neg(), lambda x: x, where=3), "where=, got 3"),
        (lambda gm: rule(lambda x: x.neg(), lambda x: x, where={"x": lambda x: True}),
         "expected an operand for 'x'"),
    ],
)  # fmt: skip
def test_what_is_no_graph_and_no_rule_is_refused(call: Any, message: str) -> None:
    with pytest.raises(FxkitError, match=re.escape(message)) as raised:
        call(symbolic_trace(lambda x: x.neg()))
    assert raised.value.hint


def test_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(torch.sin(x)))

    gm = symbolic_trace(program)
    report = rewrite(gm, _SIN, limit=2)
    assert (report.count, report.stopped) == (2, "the limit of 2 rewrites")
    assert report.table().endswith("stopped: the limit of 2 rewrites")
    monkeypatch.setenv("FXKIT_MAX_REWRITES", "1")
    assert rewrite(symbolic_trace(program), _SIN).count == 1
    assert rewrite(symbolic_trace(program), _SIN, limit=3).count == 3
    monkeypatch.setenv("FXKIT_MAX_REWRITES", "0")
    assert rewrite(symbolic_trace(program), _SIN).count == 0


def test_zeros_of_different_sign_are_two_numbers() -> None:
    to_abs = rule(lambda x: torch.copysign(x, 0.0), lambda x: torch.abs(x), name="to_abs")
    same_bound = rule(
        lambda x, low: torch.clamp(torch.clamp(x, min=low), min=low),
        lambda x, low: torch.clamp(x, min=low),
        name="same_bound",
    )
    args = (torch.tensor([-1.0, 1.0]),)
    for program, count in (
        (lambda x: torch.copysign(x, 0.0), 1),
        (lambda x: torch.copysign(x, -0.0), 0),
        (lambda x: torch.clamp(torch.clamp(x, min=-0.0), min=-0.0), 1),
        (lambda x: torch.clamp(torch.clamp(x, min=-0.0), min=0.0), 0),
    ):
        gm = symbolic_trace(program)
        propagate_types(gm, args)
        assert rewrite(gm, [to_abs, same_bound]).count == count
        assert torch.equal(gm(*args).signbit(), program(*args).signbit())


def test_replacement_of_every_form() -> None:
    """An operand, a constant, a matched value, new nodes, several results."""
    x, y = torch.randn(3), torch.randn(3)
    first = rule(lambda x, y: torch.sin(x) + torch.cos(y), lambda x, y: y.clone())
    gm = symbolic_trace(lambda a, b: (torch.sin(a) + torch.cos(b)) * 2)
    assert rewrite(gm, first).count == 1
    assert torch.equal(gm(x, y), y * 2)

    sizes = rule(lambda x: torch.sin(x) * 0, lambda x: 0)
    gm = symbolic_trace(lambda a: a + torch.sin(a) * 0)
    assert rewrite(gm, sizes).count == 1
    assert torch.equal(gm(x), x)
    assert len(gm.graph.nodes) == 3

    @rule
    def inner(x):
        """The matched sine itself."""
        sine = torch.sin(x)
        return torch.exp(torch.log(sine)), sine

    gm = symbolic_trace(lambda a: torch.exp(torch.log(torch.sin(a))) + 1)
    assert rewrite(gm, inner).count == 1
    assert torch.equal(gm(x), torch.sin(x) + 1)
    assert [node.name for node in gm.graph.nodes] == ["a", "sin", "add", "output"]

    swapped = rule(lambda x: (torch.sin(x), torch.cos(x)), lambda x: (torch.cos(x), torch.sin(x)))
    gm = symbolic_trace(lambda a: torch.sin(a) - torch.cos(a))
    assert rewrite(gm, swapped, limit=1).count == 1
    assert torch.equal(gm(x), torch.cos(x) - torch.sin(x))


@rule
def _scaled(x):
    """What follows an activation, which stays."""
    y = torch.relu(x)
    return y, y / (y.amax() + 1)


@rule
def _both_scaled(x):
    """What follows two results, which stay."""
    sine = torch.sin(x)
    one, two = sine + 1, sine * 2
    return (one, two), (one / (one.amax() + two), two.cos())


def test_a_replacement_may_take_the_results_themselves() -> None:
    """They stay, and what follows them is put behind each once, however often it is visited."""
    x = torch.randn(2, 3)

    def program(x):
        y = torch.relu(torch.relu(x))
        sine = torch.sin(y)
        one, two = sine + 1, sine * 2
        return one.exp() - two.add_(1)

    def scaled(x):
        y = x.relu()
        y = (y / (y.amax() + 1)).relu()
        sine = torch.sin(y / (y.amax() + 1))
        one, two = sine + 1, sine * 2
        return (one / (one.amax() + two)).exp() - (two.cos() + 1)

    for fixpoint in (True, False):
        gm = symbolic_trace(program)
        assert rewrite(gm, [_scaled, _both_scaled], fixpoint=fixpoint).count == 3
        gm.graph.lint()
        torch.testing.assert_close(gm(x), scaled(x))


def test_parameters_in_slices() -> None:
    def is_whole(match: Match) -> bool:
        return all(type(match[name]) is int for name in "ab")

    to_narrow = rule(
        lambda x, a, b: x[:, a:b],
        lambda x, a, b: x.narrow(1, a, b - a),
        where=is_whole,
        samples=({"a": 1, "b": 3, "x": (2, 4)},),
    )
    later = rule(
        lambda x, a: torch.exp(x[a:]),
        lambda x, a: torch.exp(x)[a:].clone(),
        samples=({"a": 1, "x": (2, 4)},),
    )
    x = torch.randn(4, 4)
    for program, count in (
        (lambda x: x[:, 1:3], 1),
        (lambda x: x[:, 1:], 0),
        (lambda x: x[1:3], 0),
        (lambda x: torch.exp(x[x.shape[1] - 2 :]), 1),
    ):
        gm = symbolic_trace(program)
        propagate_types(gm, (x,))
        assert rewrite(gm, [to_narrow, later]).count == count
        assert_equivalent(program, gm, (x,), exact=True)
    for each in (to_narrow, later):
        prove(each)


def test_a_parameter_to_convert_to_stands_for_dtypes_devices_and_tensors() -> None:
    early = rule(lambda x, dt: torch.neg(x.to(dt)).abs(), lambda x, dt: x.to(dt).abs())
    args = torch.randn(3), torch.randn(3, dtype=torch.float64)
    for program in (
        lambda x, y: torch.neg(x.to(torch.float64)).abs(),
        lambda x, y: torch.neg(x.to("cpu")).abs(),
        lambda x, y: torch.neg(x.to(y)).abs(),
    ):
        gm = symbolic_trace(program)
        propagate_types(gm, args)
        assert rewrite(gm, early).count == 1
        assert_equivalent(program, gm, args, exact=True)
    with_floats = rule(lambda x, dt: x.to(dt).abs().abs(), lambda x, dt: x.to(dt).abs())
    prove(with_floats)


def test_unused_part_of_a_replacement_is_not_made() -> None:
    wasteful = rule(lambda x: torch.sin(x), lambda x: (torch.tan(x), torch.cos(x))[1])
    gm = symbolic_trace(lambda x: torch.sin(x))
    rewrite(gm, wasteful)
    assert not gm.graph.find_nodes(op="call_function", target=torch.tan)


def test_parameters_of_a_module_become_operands() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
    gm = symbolic_trace(model)
    taken = rule(lambda x, w, b: torch.relu(F.linear(x, w, b)),
                 lambda x, w, b: torch.relu(x @ w.t() + b), exact=False)  # fmt: skip
    assert rewrite(gm, taken).count == 1
    reads = [str(node.target) for node in gm.graph.find_nodes(op="get_attr")]
    assert reads == ["0.weight", "0.bias"]
    x = torch.randn(5, 4)
    torch.testing.assert_close(gm(x), model(x))


def test_a_shared_module_is_rewritten_at_each_call() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(torch.relu(self.linear(x))))

    model = Shared()
    gm = symbolic_trace(model)
    product = rule(lambda x, w, b: F.linear(x, w, b), lambda x, w, b: x @ w.t() + b, exact=False)
    assert rewrite(gm, product).count == 2
    x = torch.randn(2, 4)
    torch.testing.assert_close(gm(x), model(x))


def test_a_hooked_module_stays() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    handle = model[0].register_forward_hook(lambda module, args, result: result * 2)
    gm = symbolic_trace(model)
    assert rewrite(gm, _RELU).count == 0
    handle.remove()
    assert rewrite(gm, _RELU).count == 1


def test_a_graph_module_inside_stays_one_call() -> None:
    inner = symbolic_trace(lambda x: torch.sin(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.inner(x))

    outer = Outer()
    graph = fx.Tracer().trace(outer)
    gm = fx.GraphModule(outer, graph)
    calls = len(gm.graph.find_nodes(op="call_module", target="inner"))
    assert rewrite(gm, _SIN).count == 2 - calls


def test_empty_graphs() -> None:
    assert rewrite(symbolic_trace(lambda x: x), _SIN).count == 0
    assert rewrite(symbolic_trace(lambda: 3), _SIN).count == 0
    graph = fx.Graph()
    graph.output(None)
    assert rewrite(fx.GraphModule(nn.Module(), graph), _SIN).count == 0


def test_no_rules() -> None:
    assert rewrite(symbolic_trace(lambda x: x), []).count == 0


class _Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


def test_new_nodes_have_types_sources_and_provenance() -> None:
    gm = symbolic_trace(nn.Sequential(_Block()))
    propagate_types(gm, (torch.randn(2, 3),))
    names = [node.name for node in gm.graph.nodes][1:3]
    parts = rule(lambda x: x * torch.sigmoid(x), lambda x: F.silu(torch.abs(x)), name="parts",
                 exact=False)  # fmt: skip
    report = rewrite(gm, parts)
    (site,) = report.sites
    assert site.inserted == ("abs_1", "silu")
    for name in site.inserted:
        node = next(n for n in gm.graph.nodes if n.name == name)
        assert provenance_of(node).replaced == tuple(names)
        assert provenance_of(node).by == ("parts",)
        source = source_of(node)
        assert source is not None and source.function == "forward"
        assert module_path(node) == "0"
        known = type_of(node)
        assert isinstance(known, TensorType) and known.shape == (2, 3)
    again = rule(lambda x: F.silu(x), lambda x: F.gelu(x), name="again")
    rewrite(gm, again)
    gelu = next(n for n in gm.graph.nodes if n.name.startswith("gelu"))
    assert provenance_of(gelu).by == ("parts", "again")
    assert provenance_of(gelu).replaced == tuple(names)


def test_report() -> None:
    gm = symbolic_trace(lambda x: torch.relu(torch.relu(torch.sin(x))) + torch.cos(x))
    report = rewrite(gm, [_RELU, _NEG, _SIN])
    assert isinstance(report, RewriteReport)
    assert report.hits == {"relu_of_relu": 1, "sin_to_cos": 1}
    assert {name: (t.tries, t.hits) for name, t in report.tallies.items()} == {
        "relu_of_relu": (1, 1),  # the others are above no relu
        "sin_to_cos": (1, 1),
    }
    lines = report.table().splitlines()
    assert lines[0].split() == ["rule", "tries", "hits", "refused", "ms"]
    assert len(lines) == 3
    relu = next(site for site in report.sites if site.rule == "relu_of_relu")
    assert str(relu).startswith("relu_of_relu at %relu_1 (test_engine.py:")
    assert str(relu).endswith("2 nodes -> %relu_2")


def test_the_graph_is_recompiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = symbolic_trace(lambda x: torch.sin(torch.sin(torch.sin(x))))
    calls: list[Any] = []
    compiled = fx.GraphModule.recompile
    monkeypatch.setattr(
        fx.GraphModule, "recompile", lambda self: (calls.append(self), compiled(self))[1]
    )
    rewrite(gm, _SIN)
    assert gm.code.count("torch.cos") == 3
    assert len(calls) == 1
    rewrite(gm, _SIN)
    assert gm.code.count("torch.cos") == 3
    assert len(calls) == 1


def _chain(hits: int) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(hits):
        value = graph.call_function(torch.add, (value, 1))
        value = graph.call_function(torch.relu, (value,))
        value = graph.call_function(torch.mul, (value, 2))
    graph.output(value)
    return fx.GraphModule(nn.Module(), graph)


def test_work_is_proportional_to_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: resolved calls, tried rules and alias look-ups, for 40 and 400 hits."""
    work = {"resolve": 0, "match": 0, "root": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            work[name] += 1
            return function(*args, **kwargs)

        return call

    for module in (engine, rule_index):
        monkeypatch.setattr(module, "operator_of", counted("resolve", module.operator_of))
    monkeypatch.setattr(engine, "find_match", counted("match", engine.find_match))
    sets = engine.Safety.__init__.__globals__["EffectOrder"].__init__.__globals__["AliasSets"]
    monkeypatch.setattr(sets, "root", counted("root", sets.root))
    fused = rule(lambda x: torch.relu(x + 1) * 2, lambda x: torch.sin(x))
    unrelated = [
        rule(eval(f"lambda x: torch.{name}(x)", {"torch": torch}), lambda x: torch.cos(x))
        for name in ("exp", "log", "sqrt", "tan", "sinh", "cosh", "erf", "floor", "ceil", "sign")
    ]
    measured = []
    for hits, rules in ((40, [fused]), (400, [fused]), (400, [fused, *unrelated])):
        work.update(dict.fromkeys(work, 0))
        assert rewrite(_chain(hits), rules).count == hits
        measured.append(dict(work))
    for name in work:
        assert measured[1][name] <= 10.5 * measured[0][name], name
        assert measured[2][name] == measured[1][name], name


def test_what_a_rewrite_lets_match_far_above_it_is_found_too() -> None:
    deep = rule(
        lambda x: torch.exp(torch.tanh(torch.sin(x).abs())), lambda x: x, benefit=9, name="deep"
    )
    low = rule(lambda x: torch.asin(x), lambda x: torch.sin(x), name="low")
    gm = symbolic_trace(lambda x: torch.exp(torch.tanh(torch.asin(x).abs())) + 1)
    assert rewrite(gm, [deep, low]).hits == {"deep": 1, "low": 1}
    assert format_graph(gm) == "graph(%x):\n  %add = aten.add(%x, 1)\n  return %add"
