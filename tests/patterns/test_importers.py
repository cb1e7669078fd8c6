"""Rules out of what was written for torch's own matchers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import PatternError
from fxkit.ir.printer import format_graph
from fxkit.patterns.engine import rewrite
from fxkit.patterns.importers import from_inductor, from_replace_pattern
from fxkit.patterns.rewriting import Rule
from fxkit.testing import assert_equivalent, assert_rewrites, prove


def scaled_sum(a, b):
    """A sum, one side doubled."""
    return a + b * 2


def fused(x, y):
    return torch.add(x, y, alpha=2)


def test_functions_correspond_by_position() -> None:
    (rule,) = from_replace_pattern([(scaled_sum, fused)])
    assert (rule.name, rule.doc) == ("scaled_sum", "A sum, one side doubled.")
    assert rule.file.endswith("test_importers.py")
    assert_rewrites(rule, lambda p, q: q + p * 2, lambda p, q: torch.add(q, p, alpha=2))
    assert_rewrites(rule, lambda p, q: q + p * 3, None)


class Twice(nn.Module):
    def forward(self, value):
        return torch.relu(torch.relu(value))


class Once(nn.Module):
    def forward(self, other):
        return F.relu(other)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "pair",
    [
        (Twice(), Once()),
        (fx.symbolic_trace(Twice()), fx.symbolic_trace(Once())),
        (fx.symbolic_trace(Twice()), lambda z: torch.relu(z)),
        (lambda z: F.relu(z.relu()), Once()),
        (nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU()),
        (fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU())), nn.ReLU()),
    ],
)
def test_modules_and_graph_modules(pair) -> None:
    (rule,) = from_replace_pattern([pair], exact=True)
    assert rule.exact
    assert_rewrites(rule, lambda x: x.relu().relu() + 1, lambda x: x.relu() + 1)
    assert prove(rule)


def test_graph_module_is_left_as_it_was() -> None:
    replacement = fx.symbolic_trace(Once())
    from_replace_pattern([(lambda anything: torch.exp(anything), replacement)])
    assert [node.target for node in replacement.graph.find_nodes(op="placeholder")] == ["other"]


def test_several_pairs_and_several_results() -> None:
    def before(x):
        power = x.exp()
        return power + 1, power + 2

    def after(x):
        return x + 1, x + 2

    rules = from_replace_pattern([(lambda x: x.sin(), lambda x: x.cos()), (before, after)])
    assert [rule.name for rule in rules] == ["imported_0", "before"]
    gm = fxkit.symbolic_trace(before)
    assert rewrite(gm, rules[1]).count == 1
    assert "exp" not in format_graph(gm)


class WithParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((scaled_sum, lambda x: x), r"expected a replacement of 2 parameter\(s\) \(a, b\), got 1"),
        ((lambda x: x.exp(), lambda x: (x, x)), "expected as many results as the pattern has"),
        ((lambda x: x, lambda x: x.exp()), "expected a pattern that computes something"),
        ((WithParameter(), lambda x: x), "expected operations on the parameters, got get_attr"),
        ((lambda *xs: xs[0] + 1, lambda x: x), r"expected named parameters, got \*xs"),
    ],
)
def test_what_is_no_pair_is_refused(pair, message) -> None:
    with pytest.raises(PatternError, match=message):
        from_replace_pattern([pair])


def attention(query, key, value, inv_scale):
    weights = torch.matmul(query, key.transpose(-2, -1)).div(inv_scale).softmax(dim=-1)
    return weights.matmul(value)


def fused_attention(query, key, value, inv_scale):
    return F.scaled_dot_product_attention(query, key, value, scale=1.0 / inv_scale).contiguous()


_EXAMPLES = [torch.empty(2, 4, 8, 16) for _ in range(3)]


def imported(check=None) -> Rule:
    return from_inductor(attention, fused_attention, _EXAMPLES, {"inv_scale": 4.0}, check)


def attend(q, k, v):
    return torch.softmax(q @ k.mT.mT.transpose(-2, -1) / 8, -1) @ v


def traced(function, *args):
    gm = fxkit.symbolic_trace(function)
    propagate_types(gm, args)
    return gm


def test_registered_replacement_is_a_rule() -> None:
    rule = imported()
    assert rule.name == "attention"
    assert rule.samples[0] == {
        "query": (2, 4, 8, 16), "key": (2, 4, 8, 16), "value": (2, 4, 8, 16), "inv_scale": 4.0,
    }  # fmt: skip
    args = tuple(torch.randn(2, 4, 8, 16) for _ in range(3))
    gm = traced(attend, *args)
    assert rewrite(gm, rule).count == 1
    assert "aten.scaled_dot_product_attention" in format_graph(gm)
    assert_equivalent(attend, gm, args)


def test_scalar_matches_numbers_only() -> None:
    def by_tensor(q, k, v, s):
        return torch.softmax(q @ k.transpose(-2, -1) / s, -1) @ v

    args = (*(torch.randn(2, 4, 8, 16) for _ in range(3)), torch.tensor(2.0))
    assert rewrite(traced(by_tensor, *args), imported()).count == 0


def test_check_reads_fake_tensors_of_the_operands() -> None:
    seen = []

    def four_heads(match):
        query = match.kwargs["query"].meta["val"]
        seen.append((tuple(query.shape), query.dtype, query.device.type, match.kwargs["inv_scale"]))
        assert match.output_node() in match.nodes
        return query.shape[1] == 4

    for heads, count in ((4, 1), (3, 0)):
        gm = traced(attend, *(torch.randn(2, heads, 8, 16) for _ in range(3)))
        report = rewrite(gm, imported(four_heads))
        assert report.count == count
        assert all("val" not in node.meta for node in gm.graph.nodes)
    assert seen[0] == ((2, 4, 8, 16), torch.float32, "cpu", 8)
    assert [why for _, _, why in report.refusals] == ["four_heads says no"]


def test_unknown_scalar_is_refused() -> None:
    with pytest.raises(PatternError, match=r"in scalar_workaround, got \['scale'\]"):
        from_inductor(attention, fused_attention, _EXAMPLES, {"scale": 4.0})
