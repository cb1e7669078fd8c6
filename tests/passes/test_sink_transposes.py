"""Transposes that cancel across element-wise operators, and those that stay where they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.ir.op import resolve
from fxkit.passes import SinkTransposes
from fxkit.passes.manager.manager import PassManager

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # by torch.export

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
_MOVERS = {"aten.transpose", "aten.permute", "aten.t", "aten.numpy_T"}


def movers(gm):
    calls = [resolve(n) for n in gm.graph.nodes]
    return sum(call is not None and call.name in _MOVERS for call in calls)


def sink(function, x=X):
    """Return the transposes before and after, checking numbers, gradients, types and writes."""
    gm = fxkit.symbolic_trace(function)
    before = movers(gm)
    PassManager([SinkTransposes()], verify="numerics", args=(x,)).run(gm)
    return before, movers(gm)


def chain(x):
    return F.gelu(torch.tanh(x.transpose(1, 2)) * 2 + 1).transpose(2, 1)


def permutations(x):
    return torch.relu(x.permute(2, 0, 1)).permute(1, 2, 0)


def two_entries(x):
    a, b = x.transpose(0, 2), (x * 2).transpose(0, 2)
    return (a.sin() + b).transpose(0, 2)


def two_exits(x):
    y = x.transpose(1, 2).sin()
    return y.transpose(1, 2) + 1, y.cos().transpose(1, 2)


def used_elsewhere(x):
    y = x.transpose(1, 2).sin()
    return y.transpose(1, 2) * 2, y.sum(1)


def number_beside(x):
    return (x.transpose(1, 2) * x.sum()).transpose(1, 2)


def casts_between(x):
    return x.transpose(1, 2).to(torch.float64).sin().transpose(1, 2)


@pytest.mark.parametrize("function, before, after", [
    (chain, 2, 0), (permutations, 2, 0), (two_entries, 3, 0), (two_exits, 3, 0),
    (used_elsewhere, 2, 1), (number_beside, 2, 0),
])  # fmt: skip
def test_cancel(function, before, after):
    assert sink(function) == (before, after)
    sink(function, X[:0])


def another_permutation(x):
    return x.transpose(1, 2).sin().transpose(0, 2)


def no_way_back(x):
    return x.transpose(1, 2).sin()


def reduced(x):
    return x.transpose(1, 2).softmax(-1).transpose(1, 2)


def written(x):
    y = x.transpose(1, 2).sin()
    z = y.transpose(1, 2)
    z.add_(1)
    return y + 1


def bias_beside(x):
    return (x.transpose(1, 2) + torch.arange(3.0)).transpose(1, 2)


def random(x):
    return F.dropout(x.transpose(1, 2), 0.5, True).transpose(1, 2)


def in_place(x):
    return (x * 1).transpose(1, 2).relu_().transpose(1, 2)


@pytest.mark.parametrize(
    "function", [another_permutation, no_way_back, reduced, written, random, in_place]
)
def test_stay(function):
    before, after = sink(function)
    assert before == after


def test_bias_is_turned_where_it_pays():
    def f(x):
        a = x.transpose(1, 2) + torch.arange(3.0)
        return a.transpose(1, 2) + 1, a.sin().transpose(1, 2)

    assert sink(bias_beside) == (2, 1)
    assert sink(f) == (3, 1)


def test_result_keeps_the_layout_that_the_caller_sees():
    gm = fxkit.symbolic_trace(lambda x: x.transpose(1, 2).contiguous().sin().transpose(1, 2))
    PassManager([SinkTransposes()], verify="numerics", args=(X,)).run(gm)
    assert gm(X).stride() == (12, 1, 3)


class Mixer(nn.Module):
    """Mixes along one axis, and turns it there and back for that."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = F.gelu(self.fc(x).transpose(1, 2)).transpose(1, 2)
        return self.fc(y)


def test_every_way_to_get_a_graph():
    module = Mixer().eval()
    graphs = [
        fxkit.symbolic_trace(module),
        fxkit.capture(module, (X,)).graph_module,
        torch.export.export(module, (X,)).module(),
    ]
    for gm in graphs:
        PassManager([SinkTransposes()], verify="numerics", args=(X,)).run(gm)
        assert movers(gm) == 0


def test_nothing_without_types():
    assert not PassManager([SinkTransposes()]).run(fxkit.symbolic_trace(chain)).modified
