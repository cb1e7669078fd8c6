"""Common subexpressions: what is merged, and what must not be."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxkit
from fxkit.analysis import moves
from fxkit.passes import CommonSubexpressionElimination
from fxkit.passes.manager.manager import PassManager


def merged(function, x):
    """Return how many nodes went, after checking that the function kept its meaning."""
    gm = fxkit.symbolic_trace(function)
    before = len(gm.graph.nodes)
    PassManager([CommonSubexpressionElimination()], args=(x,)).run(gm)
    for seed in (0, 1):
        ours, eager = x.clone(), x.clone()
        torch.manual_seed(seed)
        expected = function(eager)
        torch.manual_seed(seed)
        torch.testing.assert_close(gm(ours), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ours, eager)
    return before - len(gm.graph.nodes)


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def test_spellings_are_one():
    assert merged(lambda x: torch.relu(x) + F.relu(x) + x.relu() + x.clamp(min=0), X) == 2


def test_chains_collapse():
    assert merged(lambda x: (x.exp() * 2).sum() + (torch.exp(x) * 2).sum(), X) == 3


def test_named_and_positional_arguments_are_one():
    assert merged(lambda x: torch.softmax(x, -1) + F.softmax(x, dim=-1), X) == 1


def different_numbers(x):
    return x * 1 + x * 1.0


def different_alpha(x):
    return torch.add(x, x, alpha=2) + torch.add(x, x)


def written_between(x):
    a = x * 2
    x.add_(1)
    return a + x * 2


def written_through_view_between(x):
    a = x.exp()
    x[0].zero_()
    return a + x.exp()


def result_written(x):
    a = x * 2
    b = x * 2
    a.add_(1)
    return a + b


def result_written_through_view(x):
    a = x * 2
    b = x * 2
    b.view(-1).zero_()
    return a + b


def random(x):
    return torch.rand_like(x) + torch.rand_like(x)


def dropout(x):
    return F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True)


@pytest.mark.parametrize(
    "function",
    [
        different_numbers,
        different_alpha,
        written_between,
        written_through_view_between,
        result_written,
        result_written_through_view,
        random,
        dropout,
    ],
)
def test_not_merged(function):
    assert merged(function, X) == 0


def test_two_results_stay_two_tensors():
    def f(x):
        return x * 2, x * 2

    gm = fxkit.symbolic_trace(f)
    PassManager([CommonSubexpressionElimination()]).run(gm)
    a, b = gm(X)
    a.add_(1)
    assert torch.equal(b, X * 2)


def test_two_conversions_stay_two_tensors():
    program = fxkit.compile(lambda x: (x.double(), x.to(torch.float64), x.double() + x.double()))
    for _ in range(2):
        a, b, _ = program(X)
        a.add_(1)
        assert torch.equal(b, X.double())
    assert merged(lambda x: x.double() + x.double(), X) == 1


def test_users_of_equal_views_are_asked_once_each(monkeypatch):
    asked = []

    def may_set(user):
        asked.append(user)
        return False

    monkeypatch.setattr(moves, "_may_set", may_set)
    graph = fx.Graph()
    x = total = graph.placeholder("x")
    for _ in range(50):
        view = graph.call_method("view", (x, -1))
        total = graph.call_function(torch.add, (view, total))
    graph.output(total)
    gm = fx.GraphModule(torch.nn.Module(), graph)
    PassManager([CommonSubexpressionElimination()], verify="off").run(gm)
    assert len(gm.graph.find_nodes(op="call_method", target="view")) == 1
    assert len(asked) == 50


def test_what_is_set_of_one_of_several_views_keeps_it():
    def program(x):
        views = [x.view(-1) for _ in range(4)]
        views[2].t_()
        return sum(view.sum() for view in views)

    assert merged(program, X) == 2


def test_not_merged_across_a_mode():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.mul, (x, 2))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    b = graph.call_function(torch.mul, (x, 2))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    sums = [graph.call_function(torch.add, (v, 1)) for v in (a, b)]
    graph.output(tuple(sums))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert not PassManager([CommonSubexpressionElimination()]).run(gm).modified
    results = gm(X.clone().requires_grad_())
    assert [r.requires_grad for r in results] == [True, False]


class _State(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.zeros(3))
        self.register_buffer("c", torch.ones(3))
        self.inner = torch.nn.Module()
        self.inner.register_buffer("b", torch.ones(3))


def _random_program_of_state(seed: int) -> fx.GraphModule:
    """Return a program that reads and writes its buffers, each as often as chance has it."""
    draw, graph = Random(seed), fx.Graph()
    values = [graph.placeholder("x")]
    reads: list[fx.Node] = [graph.get_attr("b")]
    for _ in range(draw.randint(4, 14)):
        kind = draw.choice(["read", "read", "compute", "compute", "view", "write", "copy"])
        if kind == "read":
            reads.append(graph.get_attr(draw.choice(["b", "b", "c", "inner.b"])))
            values.append(reads[-1])
        elif kind == "compute":
            operator = draw.choice([torch.add, torch.mul])
            values.append(graph.call_function(operator, tuple(draw.choices(values, k=2))))
        elif kind == "view":
            values.append(graph.call_method("view", (draw.choice(values), 3)))
        elif kind == "write":
            factor = draw.choice([2, values[0]])
            written = graph.call_method("mul_", (draw.choice(reads), factor))
            values += draw.choice([[], [written]])
        else:
            graph.call_method("copy_", (draw.choice(reads), draw.choice(values)))
    graph.output(tuple(draw.choices(values, k=3)))
    return fx.GraphModule(_State(), graph)


@pytest.mark.parametrize("is_typed", [False, True])
def test_reads_of_one_buffer_are_merged_around_writes(is_typed: bool) -> None:
    for seed in range(80):
        gm = _random_program_of_state(seed)
        expected, x = copy.deepcopy(gm), torch.tensor([1.0, 2.0, 3.0])
        PassManager([CommonSubexpressionElimination()], args=(x,) if is_typed else None).run(gm)
        torch.testing.assert_close(gm(x.clone()), expected(x.clone()), rtol=0, atol=0)
        for ours, eager in zip(gm.buffers(), expected.buffers(), strict=True):
            assert torch.equal(ours, eager), seed


def test_two_reads_of_one_buffer_are_one_node() -> None:
    graph = fx.Graph()
    first, second = graph.get_attr("b"), graph.get_attr("b")
    written = graph.call_method("copy_", (graph.get_attr("c"), first))
    graph.output((second, written))
    gm = fx.GraphModule(_State(), graph)
    PassManager([CommonSubexpressionElimination()]).run(gm)
    assert [str(n.target) for n in gm.graph.nodes if n.op == "get_attr"] == ["b", "c"]


@pytest.mark.parametrize(
    "trace", [fxkit.symbolic_trace, lambda f: fxkit.capture(f, (X,)).graph_module]
)
@pytest.mark.parametrize(
    "copied",
    [
        lambda x: x.mT.contiguous(),
        lambda x: x[:, ::2].contiguous(),
        lambda x: x.mT.flatten(),
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float64),
    ],
)
def test_equal_copies_that_both_leave_stay_two(copied, trace):
    def program(x):
        return copied(x), copied(x)

    gm = trace(program)
    fxkit.PassManager([CommonSubexpressionElimination()], args=(X,)).run(gm)
    expected, found = program(X), gm(X)
    torch.testing.assert_close(found, expected)
    assert (found[0] is found[1]) == (expected[0] is expected[1])
    shares = [a.data_ptr() == b.data_ptr() for a, b in (found, expected)]
    assert shares[0] == shares[1]
