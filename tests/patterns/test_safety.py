"""What effects forbid: each case is one that a rewriter without effects gets wrong."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.subgraph_rewriter import replace_pattern

from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.verifier import verify
from fxkit.patterns.engine import find, rewrite
from fxkit.patterns.rewriting import Rule, rule
from fxkit.testing import assert_equivalent
from fxkit.tracing import capture
from fxkit.tracing.symbolic import symbolic_trace

_NEG_NEG = rule(lambda x: x.neg().neg(), lambda x: x, name="neg_neg")
_TWICE = rule(lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(x), name="twice")
_EXP_PLUS = rule(lambda x, y: torch.exp(x) + y, lambda x, y: y + torch.exp(x), name="exp_plus",
                 commute=False)  # fmt: skip
_TIMES_ONE = rule(lambda x: x * 1, lambda x: x, name="times_one")
_EVAL_DROPOUT = rule(lambda x: F.dropout(x, 0.5, False), lambda x: x, name="eval_dropout")
_TWO_SIDES = rule(lambda x, y, z: (torch.maximum(x, y), torch.minimum(x, z)),
                  lambda x, y, z: (torch.fmax(x, y), torch.fmin(x, z)),
                  name="two_sides")  # fmt: skip


_TWICE_ALIKE = rule(lambda x: (torch.sin(x), torch.sin(x)),
                    lambda x: (lambda s: (s, s.view(-1)))(torch.sin(x).view(-1)),
                    name="twice_alike")  # fmt: skip
_SINE_OF_EACH = rule(lambda x, y, z: (torch.sin(x) * y, torch.cos(z) * y),
                     lambda x, y, z: (y * torch.sin(x), y * torch.cos(z)),
                     name="sine_of_each")  # fmt: skip


def _wrote_between(x: torch.Tensor) -> torch.Tensor:
    first = x.neg()
    x.add_(1)
    return first.neg() + x


def _wrote_operand_between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = torch.exp(x)
    x.mul_(0)
    return first + y


def _wrote_through_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    row = x[0]
    first = torch.exp(x)
    row.fill_(0.0)
    return first + y


def _wrote_through_chunk(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    _, lower = x.chunk(2)
    first = torch.exp(x)
    lower.zero_()
    return first + y


def _wrote_through_expand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    view = x.t().unsqueeze(0).squeeze()
    first = torch.exp(x)
    view.zero_()
    return first + y


def _set_item_between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = torch.exp(x)
    operator.setitem(x, 0, 0.0)
    return first + y


def _out_between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = torch.exp(x)
    torch.sin(y, out=x)
    return first + y


def _interior_written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = torch.exp(x)
    first.mul_(3)
    return first + y


def _interior_view_written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = torch.exp(x)
    first[0].zero_()
    return first + y


def _inplace_flag_between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = torch.exp(x)
    F.relu(x, inplace=True)
    return first + y


def _operand_written_later(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = x + x
    same = doubled * 1
    doubled.add_(1)
    return doubled.clone(), same.clone()


def _result_written_later(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = x + x
    same = doubled * 1
    same.add_(1)
    return doubled.clone(), same.clone()


def _result_view_written_later(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = x + x
    same = doubled * 1
    same[0].zero_()
    return doubled.clone(), same.clone()


def _result_is_argument_copy(x: torch.Tensor) -> torch.Tensor:
    return x * 1


def _two_results_one_value(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = x + x
    return doubled, doubled * 1


def _result_of_two_written(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.sin(x), torch.sin(x)
    first.add_(1)
    return first - second


def _used_in_an_operand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lower = torch.minimum(x, y)
    return torch.maximum(x, lower.exp()) + lower


def _made_of_a_result(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lower = torch.minimum(x, y)
    return lower.exp() + torch.maximum(x, y.view(-1).view(4, 4) * lower)


def _made_of_what_is_written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lower = torch.minimum(x, x).exp()
    y.mul_(2)
    return lower + torch.maximum(x, -y)


def _made_of_random_numbers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lower = torch.minimum(x, y).exp()
    return lower + torch.maximum(x, torch.rand_like(y))


def _used_before_a_write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lower = torch.minimum(x, x).exp()
    y.mul_(2)
    return lower + torch.maximum(x, y)


def _wrote_between_results(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lower = torch.minimum(x, y)
    y.mul_(2)
    return lower + torch.maximum(x, y)


@dataclass(frozen=True)
class Case:
    """A rule, a program that it must leave alone, why, and both sides for torch's rewriter."""

    rule: Rule
    program: Callable[..., Any]
    reason: str
    arity: int = 2
    before: Callable[..., Any] | None = None
    after: Callable[..., Any] | None = None


def _exp_plus_case(program: Callable[..., Any], reason: str) -> Case:
    return Case(_EXP_PLUS, program, reason, before=lambda x, y: torch.exp(x) + y,
                after=lambda x, y: y + torch.exp(x))  # fmt: skip


_REFUSED: dict[str, Case] = {
    "write between": Case(_NEG_NEG, _wrote_between, "%add_ may write to %x before %neg_1", 1,
                          lambda x: x.neg().neg(), lambda x: x),
    "write to an operand": _exp_plus_case(_wrote_operand_between, "%mul_ may write to %x"),
    "write through a view": _exp_plus_case(_wrote_through_view, "%fill_ may write to %x"),
    "write through views": _exp_plus_case(_wrote_through_expand, "%zero_ may write to %x"),
    "write through a chunk": _exp_plus_case(_wrote_through_chunk, "%zero_ may write to %x"),
    "item assignment": _exp_plus_case(_set_item_between, "%setitem may write to %x"),
    "out=": _exp_plus_case(_out_between, "%sin may write to %x"),
    "inplace=True": _exp_plus_case(_inplace_flag_between, "%relu may write to %x"),
    "interior written": _exp_plus_case(_interior_written, "%exp is used outside of the match"),
    "interior's view": _exp_plus_case(_interior_view_written, "%exp is used outside of the match"),
    "operand written later": Case(_TIMES_ONE, _operand_written_later, "would share memory", 1,
                                  lambda x: x * 1, lambda x: x),
    "result written later": Case(_TIMES_ONE, _result_written_later, "would share memory", 1,
                                 lambda x: x * 1, lambda x: x),
    "result's view written": Case(_TIMES_ONE, _result_view_written_later, "would share memory", 1,
                                  lambda x: x * 1, lambda x: x),
    "argument returned": Case(_TIMES_ONE, _result_is_argument_copy, "the caller gets both", 1),
    "one result twice": Case(_TIMES_ONE, _two_results_one_value, "the caller gets both", 1),
    "used in an operand": Case(_TWO_SIDES, _used_in_an_operand,
                               "before %exp, which uses %minimum, and after %exp, which %maximum "
                               "takes"),
    "used before a write": Case(_TWO_SIDES, _used_before_a_write,
                                "before %exp, which uses %minimum, and after %mul_, which may "
                                "write to %y"),
    "made of a result": Case(_TWO_SIDES, _made_of_a_result,
                             "before %exp, which uses %minimum, and after %mul, which %maximum"),
    "made of what is written": Case(_TWO_SIDES, _made_of_what_is_written,
                                    "before %exp, which uses %minimum, and after %neg, which"),
    "made of random numbers": Case(_TWO_SIDES, _made_of_random_numbers,
                                   "before %exp, which uses %minimum, and after %rand_like"),
    "write between results": Case(_TWO_SIDES, _wrote_between_results,
                                  "before %mul_, which may write to %y, and after %mul_"),
    "two results become one": Case(_TWICE_ALIKE, _result_of_two_written, "would share memory", 1),
    "the caller gets one of two": Case(_TWICE_ALIKE, lambda x: (torch.sin(x), torch.sin(x)),
                                       "the caller gets both", 1),
    "one result made of another": Case(_SINE_OF_EACH, lambda x, y: torch.cos(torch.sin(x) * y) * y,
                                       "%mul is an operand of the match too"),
}  # fmt: skip


def _inputs(case: Case) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(4, 4) for _ in range(case.arity))


@pytest.mark.parametrize("name", sorted(_REFUSED))
@pytest.mark.parametrize("typed", [True, False])
def test_unsafe_match_is_left_alone(name: str, typed: bool) -> None:
    case = _REFUSED[name]
    gm = symbolic_trace(case.program)
    if typed:
        propagate_types(gm, _inputs(case))
    report = rewrite(gm, case.rule)
    assert report.count == 0
    assert any(case.reason in reason for _, _, reason in report.refusals), report.table()
    assert_equivalent(case.program, gm, _inputs(case), exact=True)


# What is used outside of the match torch leaves alone as well.
_LEFT_BY_TORCH = {"interior written", "interior's view"}
_REWRITTEN_BY_TORCH = {name for name, case in _REFUSED.items() if case.before} - _LEFT_BY_TORCH


@pytest.mark.parametrize("name", sorted(_REWRITTEN_BY_TORCH))
def test_torch_rewrites_it_wrongly(name: str) -> None:
    """The cases are hard: `torch.fx.subgraph_rewriter` changes what these programs compute.

    Where this fails, torch has become careful and the case shows nothing any more.
    """
    case = _REFUSED[name]
    gm = symbolic_trace(case.program)
    args = _inputs(case)
    expected = case.program(*[a.clone() for a in args])
    assert case.before is not None and case.after is not None
    replace_pattern(gm, case.before, case.after)
    got = gm(*[a.clone() for a in args])
    expected, got = (r if isinstance(r, tuple) else (r,) for r in (expected, got))
    assert any(not torch.allclose(e, g) for e, g in zip(expected, got, strict=True))


def test_the_same_match_is_rewritten_where_nothing_forbids_it() -> None:
    def calm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = torch.exp(x)
        y.clone().add_(1)
        return first + y

    gm = symbolic_trace(calm)
    assert rewrite(gm, _EXP_PLUS, limit=1).count == 1

    def written_before_and_after(x: torch.Tensor) -> torch.Tensor:
        doubled = x + x
        doubled.mul_(2)
        result = doubled.neg().neg() + 1
        doubled.zero_()
        return result

    gm = symbolic_trace(written_before_and_after)
    # The result shares memory with the operand then, but nobody reads it after the last write.
    assert rewrite(gm, _NEG_NEG).count == 1
    assert_equivalent(written_before_and_after, gm, (torch.randn(3),), exact=True)
    gm = symbolic_trace(written_before_and_after)
    copying = rule(lambda x: x.neg().neg(), lambda x: x.clone())
    assert rewrite(gm, copying).count == 1
    assert_equivalent(written_before_and_after, gm, (torch.randn(3),), exact=True)


def test_a_rewrite_extends_memory_that_is_shared() -> None:
    """The first rewrite makes %a of the caller's memory; the second must know."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = -x
        return a * 1, a * 1

    gm = symbolic_trace(program)
    assert rewrite(gm, _TIMES_ONE).count == 1
    first, second = gm(torch.randn(3))
    assert first.data_ptr() != second.data_ptr()


# Effects that have to stay, in number and order.

_CALLS: list[str] = []


def _log(x: torch.Tensor) -> torch.Tensor:
    _CALLS.append("called")
    return x


fx.wrap("_log")


def _with_print(x: torch.Tensor) -> torch.Tensor:
    _log(x)
    return x.neg().neg() + 1


def _with_unused_write(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.add_(1)
    F.relu(y, inplace=True)
    return x.neg().neg() + y


def _with_out(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    return x.neg().neg() + y


def _with_check(x: torch.Tensor) -> torch.Tensor:
    torch._assert(x.shape[0] == 4, "four rows")
    return x.neg().neg() + 1


@pytest.mark.parametrize("program", [_with_print, _with_unused_write, _with_out, _with_check])
def test_effects_that_nobody_uses_stay(program: Callable[..., Any]) -> None:
    gm = symbolic_trace(program)
    before = len(gm.graph.nodes)
    _CALLS.clear()
    assert rewrite(gm, _NEG_NEG).count == 1
    assert len(gm.graph.nodes) == before - 2
    x = torch.randn(4, 4)
    assert torch.equal(gm(x), program(x))
    assert len(_CALLS) == 2 * (program is _with_print)
    if program is _with_check:
        with pytest.raises(AssertionError, match="four rows"):
            gm(torch.randn(3, 4))


def test_random_numbers_are_drawn_once_and_in_order() -> None:
    noisy = rule(lambda x, y: torch.rand_like(x) + y, lambda x, y: y + torch.rand_like(x),
                 commute=False)  # fmt: skip

    def crossed(x: torch.Tensor) -> torch.Tensor:
        first = torch.rand_like(x)
        second = torch.rand_like(x)
        return (first + x) * second

    def straight(x: torch.Tensor) -> torch.Tensor:
        return (torch.rand_like(x) + x) * torch.rand_like(x)

    def twice(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        return noise + noise

    for program, count in ((crossed, 0), (straight, 1), (twice, 0)):
        gm = symbolic_trace(program)
        assert rewrite(gm, noisy, limit=1).count == count, program.__name__
        assert_equivalent(program, gm, (torch.randn(3),), exact=True)


def test_equal_random_operators_are_not_one() -> None:
    squared = rule(lambda x: (lambda n: n * n)(torch.rand_like(x)),
                   lambda x: torch.square(torch.rand_like(x)))  # fmt: skip

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x) * torch.rand_like(x)

    gm = symbolic_trace(product)
    assert rewrite(gm, squared).count == 0


@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_batch_norm_go_only_outside_of_training(training: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.norm(x)) + 1

    affine = rule(
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        lambda x, m, v, w, b: (x - m) * torch.rsqrt(v + 1e-5) * w + b,
        exact=False,
    )
    model = Model().train(training)
    gm = symbolic_trace(model)
    report = rewrite(gm, [_EVAL_DROPOUT, affine])
    assert report.count == (0 if training else 2)
    x = torch.randn(8, 4)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(gm(x), expected)


_HOLDERS: dict[str, Callable[..., Any]] = {
    "tuple": lambda n, x: (-n, n),
    "list": lambda n, x: [-n, n],
    "nested": lambda n, x: (-n, [x, (n,)]),
    "dictionary": lambda n, x: {"a": -n, "b": n},
    "list operand": lambda n, x: torch.cat([-n, n]),
    "slice": lambda n, x: (-n, x[slice(0, n.shape[0])]),
    "index": lambda n, x: (-n)[n > 0],
}


@pytest.mark.parametrize("holder", sorted(_HOLDERS))
def test_interior_value_that_is_used_elsewhere_stays(holder: str) -> None:
    build = _HOLDERS[holder]

    def program(x: torch.Tensor) -> Any:
        return build(-x, x)

    gm = symbolic_trace(program)
    report = rewrite(gm, rule(lambda x: x.neg().neg(), lambda x: x.clone()))
    assert report.count == 0
    assert "%neg is used outside of the match too" in report.refusals[0][2]
    assert_equivalent(program, gm, (torch.randn(3),), exact=True)


def test_interior_value_that_the_replacement_reuses_may_be_used_elsewhere() -> None:
    @rule
    def keep_inner(x):
        """Reuse."""
        inner = torch.exp(x)
        return inner * 2 + inner, inner * 3

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = torch.exp(x)
        return inner * 2 + inner, inner

    gm = symbolic_trace(program)
    assert rewrite(gm, keep_inner).count == 1
    assert len(gm.graph.find_nodes(op="call_function", target=torch.exp)) == 1
    assert_equivalent(program, gm, (torch.randn(3),))


def test_opaque_call_is_a_wall() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = torch.exp(x)
        _log(x)
        return first + y

    gm = symbolic_trace(program)
    report = rewrite(gm, _EXP_PLUS, limit=1)
    assert report.count == 0
    assert "may write to %x" in report.refusals[0][2]


def test_mode_between_is_a_wall_for_what_it_changes() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        torch.manual_seed(3)
        return noise + y

    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    noise = graph.call_function(torch.rand_like, (x,))
    graph.call_function(torch.manual_seed, (3,))
    graph.output(graph.call_function(operator.add, (noise, y)))
    gm = fx.GraphModule(nn.Module(), graph)
    moved = rule(lambda x, y: torch.rand_like(x) + y, lambda x, y: y - (-torch.rand_like(x)))
    assert rewrite(gm, moved).count == 0
    assert_equivalent(program, gm, (torch.randn(3), torch.randn(3)), exact=True)


class _Statistics(nn.Module):
    """Reads a buffer beside the batch norm that writes it, in the same graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = self.norm.get_buffer("running_mean") * 2
        normal = self.norm(x)
        return scaled + 1, normal


def test_statistics_that_a_module_writes_are_operands_like_others() -> None:
    later = rule(lambda x: x * 2 + 1, lambda x: (x + 0.5) * 2, name="later")
    for training, count in ((True, 0), (False, 1)):
        model = _Statistics().train(training)
        gm = symbolic_trace(model)
        report = rewrite(gm, later)
        assert report.count == count
        assert training == any("%norm may write to %norm_running_mean" in reason
                               for _, _, reason in report.refusals)  # fmt: skip


def test_a_parameter_written_through_an_attribute_is_noticed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4).eval(), nn.ReLU())
    graph = fx.Graph()
    x = graph.placeholder("x")
    normal = graph.call_module("0", (x,))
    mean = graph.create_node("get_attr", "0.running_mean")
    graph.call_method("add_", (mean, 1))
    graph.output(graph.call_module("1", (normal,)))
    gm = fx.GraphModule(model, graph)
    fused = rule(lambda x, m, v, w, b: torch.relu(F.batch_norm(x, m, v, w, b)),
                 lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b).relu().relu())  # fmt: skip
    report = rewrite(gm, fused, limit=1)
    assert report.count == 0
    assert "%add_ may write to self.0.running_mean" in report.refusals[0][2]


# Programs that a rule of two results changes: what stands between them is no obstacle.
_TOGETHER: dict[str, Callable[..., Any]] = {
    "in order": lambda x, y: torch.maximum(x, y) + torch.minimum(x, x),
    "the other way round": lambda x, y: torch.minimum(x, x) + torch.maximum(x, y),
    "a late operand": lambda x, y: torch.minimum(x, y) + torch.maximum(x, y.exp()),
    "an early user": lambda x, y: torch.minimum(x, y).exp() + torch.maximum(x, y),
    "a view of each": lambda x, y: torch.minimum(x, y).view(-1) @ torch.maximum(x, y).view(-1),
    "a view elsewhere": lambda x, y: (torch.minimum(x, y) + torch.maximum(x, y)).view(-1),
    "views of the operands": lambda x, y: (
        lambda v: torch.minimum(v, y.view(-1)).view(-1) + torch.maximum(v, y.view(-1))
    )(x.view(-1)),
    "an operand of several steps": lambda x, y: (
        torch.minimum(x, x).exp() * torch.maximum(x, (-y).exp() * y + x)
    ),
    "a write before": lambda x, y: (x.add_(1), torch.minimum(x, y), torch.maximum(x, y)),
    "a write after": lambda x, y: (torch.maximum(x, y) - torch.minimum(x, y), x.add_(1)),
    "a write to other memory": lambda x, y: (
        torch.maximum(x, y), x.clone().add_(1), torch.minimum(x, y)
    ),
    "a write to a result": lambda x, y: torch.maximum(x, y).add_(1) - torch.minimum(x, y),
    "a write to what one reads": lambda x, y: (
        torch.minimum(x, x), torch.exp(y.mul_(2)), torch.maximum(x, y)
    ),
    "a random number": lambda x, y: torch.maximum(x, y) + torch.rand_like(x) - torch.minimum(x, y),
}  # fmt: skip


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("name", sorted(_TOGETHER))
def test_several_results_come_together(name: str, typed: bool) -> None:
    program = _TOGETHER[name]
    args = torch.randn(3), torch.randn(3)
    gm = symbolic_trace(program)
    if typed:
        propagate_types(gm, args)
    report = rewrite(gm, _TWO_SIDES)
    assert report.count == 1, report.refusals
    verify(gm)
    torch.manual_seed(0)
    expected = program(*[a.clone() for a in args])
    torch.manual_seed(0)
    torch.testing.assert_close(gm(*[a.clone() for a in args]), expected, rtol=0, atol=0)


def test_a_result_that_is_taken_after_a_write_to_another_is_no_obstacle() -> None:
    def program(x: Any) -> Any:
        both = torch.topk(x, 2)
        values = both[0]
        shares = values.div_(values.sum(-1, keepdim=True))
        return shares, both[1]

    gm = symbolic_trace(program)
    (x,) = args = (torch.rand(3, 5),)
    propagate_types(gm, args)
    largest = rule(lambda x: (lambda t: (t[0], t[1]))(torch.topk(x, 2)),
                   lambda x: (lambda t: (t[0][..., :2], t[1][..., :2]))(
                       torch.sort(x, descending=True)), exact=False)  # fmt: skip
    report = rewrite(gm, largest)
    assert report.count == 1, report.refusals
    verify(gm)
    torch.testing.assert_close(gm(x.clone()), program(x.clone()))


def _queries_keys_values(x: Any, q: Any, k: Any, v: Any) -> Any:
    """Three layers, each followed by what cuts its result into heads."""
    queries = F.linear(x, q).view(2, 5, 2, 3).transpose(1, 2)
    keys = F.linear(x, k).view(2, 5, 2, 3).transpose(1, 2)
    values = F.linear(x, v).view(2, 5, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(queries, keys, values)


def _written_after_the_first(x: Any, q: Any, k: Any, v: Any) -> Any:
    queries = F.linear(x, q)
    x.mul_(2)
    return queries, F.linear(x, k), F.linear(x, v)


def _scaled_in_place(x: Any, q: Any, k: Any, v: Any) -> Any:
    queries = F.linear(x, q).mul_(0.5)
    return queries @ F.linear(x, k).mT @ F.linear(x, v)


@pytest.mark.parametrize(
    ("program", "count"),
    [(_queries_keys_values, 1), (_scaled_in_place, 1), (_written_after_the_first, 0)],
)
def test_layers_of_one_operand_become_one(program: Callable[..., Any], count: int) -> None:
    @rule(exact=False)
    def one_layer(x, a, b, c):
        """One product for three."""
        parts = F.linear(x, torch.cat([a, b, c])).chunk(3, -1)
        return (F.linear(x, a), F.linear(x, b), F.linear(x, c)), (parts[0], parts[1], parts[2])

    gm = symbolic_trace(program)
    args = (torch.randn(2, 5, 4), *(torch.randn(6, 4) for _ in range(3)))
    propagate_types(gm, args)
    assert rewrite(gm, one_layer).count == count
    verify(gm)
    assert len(find(gm, lambda x, w: F.linear(x, w))) == (1 if count else 3)
    assert_equivalent(program, gm, args)


def test_parts_of_a_split_are_not_one_memory() -> None:
    parts = rule(lambda x: (x + 1, x * 2), lambda x: (lambda t: (t[0], t[1].view(-1), ))(
        torch.stack([x + 1, x * 2]).unbind(0)))  # fmt: skip
    whole = rule(lambda x: (x + 1, x * 2), lambda x: (lambda t: (t[0], t))(x.chunk(2)))
    equal = rule(lambda x: (x + 1, x * 2), lambda x: (lambda t: (t[0], t[0]))(x.chunk(2)))
    from_the_end = rule(lambda x: (x + 1, x * 2), lambda x: (lambda t: (t[0], t[-2]))(x.chunk(2)))
    assert parts.template.overlapping == ()
    for one in (whole, equal, from_the_end):
        assert one.template.overlapping == ((0, 1),)


def test_weights_that_are_read_late_are_lifted() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 6), nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x).view(-1, 2, 3) * self.k(x).view(-1, 2, 3)

    @rule(exact=False)
    def one_layer(x, a, b, c, d):
        """One product for two."""
        parts = F.linear(x, torch.cat([a, b]), torch.cat([c, d])).chunk(2, -1)
        return (F.linear(x, a, c), F.linear(x, b, d)), (parts[0].clone(), parts[1].clone())

    model, x = Heads(), torch.randn(5, 4)
    for gm in (symbolic_trace(model), capture(model, (x,)).graph_module):
        propagate_types(gm, (x,))
        report = rewrite(gm, one_layer)
        assert report.count == 1, report.refusals
        verify(gm)
        assert_equivalent(model, gm, (x,))


def test_no_more_than_some_operands_are_lifted() -> None:
    for steps, count in ((16, 1), (17, 0)):

        def program(x: torch.Tensor, y: torch.Tensor, steps: int = steps) -> torch.Tensor:
            lower = torch.minimum(x, y).exp()
            for _ in range(steps):
                y = torch.sin(y)
            return lower + torch.maximum(x, y)

        gm = symbolic_trace(lambda x, y, program=program: program(x, y))
        assert rewrite(gm, _TWO_SIDES).count == count
