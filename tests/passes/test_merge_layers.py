"""Layers that share an operand: what is merged, what is copied, and what stays apart."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.ir.op import resolve
from fxkit.passes import MergeLayers
from fxkit.passes.manager.manager import PassManager
from tests.architectures import HUGGING_FACE

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # by torch.export

LAYERS = {"aten.linear", "aten.addmm", "aten.mm", "aten.matmul", "aten.conv1d", "aten.conv2d"}


def calls(gm, *names):
    found = [resolve(n) for n in gm.graph.nodes]
    return sum(call.name in (names or LAYERS) for call in found if call is not None)


def merge(gm, *args, **options):
    """Run the pass, checking numbers, gradients and types; return its notes."""
    result = PassManager([MergeLayers(**options)], verify="numerics", args=args).run(gm)
    return result.records[0].notes


class Attention(nn.Module):
    """Queries, keys and values; as many heads for keys and values as asked for."""

    def __init__(self, heads=4, groups=4, bias=(True, True, True)):
        super().__init__()
        self.q = nn.Linear(12, 8 * heads, bias=bias[0])
        self.k = nn.Linear(12, 8 * groups, bias=bias[1])
        self.v = nn.Linear(12, 8 * groups, bias=bias[2])

    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return y.transpose(1, 2).reshape(*x.shape[:2], -1)


X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


def _traced(module, args):
    return fxkit.symbolic_trace(module)


def _captured(module, args):
    return fxkit.capture(module, args).graph_module


def _exported(module, args):
    return torch.export.export(module, args).module()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [_captured, _exported])
@pytest.mark.parametrize("options", [
    {}, {"groups": 2}, {"bias": (True, False, False)}, {"bias": (False, False, False)},
])  # fmt: skip
def test_queries_keys_and_values(make, options):
    gm = make(Attention(**options).eval(), (X,))
    merge(gm, X)
    assert calls(gm) == 1
    biased = any(options.get("bias", (True,)))
    assert sum("_bias" in n.target for n in gm.graph.nodes if n.op == "get_attr") >= biased


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(12, 20, bias=False), nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("make", [_traced, _captured, _exported])
def test_gate_and_up(make):
    module = Gated()
    before = copy.deepcopy(module.state_dict())
    gm = make(module, (X,))
    merge(gm, X)
    assert calls(gm) == 2
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in before.items())


def test_empty_operand():
    gm = fxkit.symbolic_trace(Gated())
    merge(gm, X[:0])
    assert calls(gm) == 2


def test_flipped_weights():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(12, n)) for n in (4, 6))
            self.c = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return torch.addmm(self.c, x, self.a).sin(), torch.mm(x, self.b).cos()

    class Same(Products):
        def forward(self, x):
            return torch.mm(x, self.a).sin(), torch.mm(x, self.b).cos()

    for cls, left in ((Same, 1), (Products, 2)):
        gm = fxkit.symbolic_trace(cls())
        merge(gm, X[0])
        assert calls(gm) == left


class Branches(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.a = nn.Conv2d(4, 3, 3, **options)
        self.b = nn.Conv2d(4, 5, 3, bias=False, **options)

    def forward(self, x):
        return torch.cat([torch.relu(self.a(x)), torch.sigmoid(self.b(x))], 1)


def test_convolutions():
    picture = torch.randn(2, 4, 7, 6)
    gm = fxkit.symbolic_trace(Branches(padding=1, stride=2))
    merge(gm, picture)
    assert calls(gm) == 1
    gm = fxkit.symbolic_trace(Branches())
    merge(gm, picture, convolutions=False)
    assert calls(gm) == 2


def test_convolutions_of_another_form_stay():
    class Different(Branches):
        def __init__(self):
            super().__init__()
            self.b = nn.Conv2d(4, 5, 3, padding=1)

        def forward(self, x):
            return torch.relu(self.a(x)), torch.relu(self.b(x))

    gm = fxkit.symbolic_trace(Different())
    merge(gm, torch.randn(2, 4, 7, 6))
    assert calls(gm) == 2


def test_part_that_the_caller_gets_is_copied():
    class Returned(Attention):
        def forward(self, x):
            return torch.sin(self.q(x)), torch.cos(self.k(x)), self.v(x)

    gm = fxkit.symbolic_trace(Returned())
    merge(gm, X)
    assert (calls(gm), calls(gm, "aten.contiguous")) == (1, 1)
    assert gm(X)[2].is_contiguous()


def test_two_results_stay_two_tensors():
    class Returned(Gated):
        def forward(self, x):
            return self.gate(x), self.up(x)

    gm = fxkit.symbolic_trace(Returned())
    notes = merge(gm, X)
    assert calls(gm) == 2
    assert "stay apart" in notes[0]


class WrittenResult(Gated):
    def forward(self, x):
        return self.gate(x).mul_(2).sin() + self.up(x)


class WrittenOperand(Gated):
    def forward(self, x):
        x = x * 2
        y = self.gate(x).sin()
        x.add_(1)
        return y + self.up(x)


class WrittenWeight(Gated):
    def forward(self, x):
        self.up.weight.add_(x.mean())
        return self.gate(x) * self.up(x)


class OtherOperand(Gated):
    def forward(self, x):
        return self.gate(x) * self.up(x.sin())


class DifferentDtype(Gated):
    def forward(self, x):
        return F.linear(x, self.gate.weight.double()).float() * self.up(x.float()).sin()


class Flat(Gated):
    def forward(self, x):
        return self.gate(x).view(-1), self.up(x).view(-1)


@pytest.mark.parametrize("cls", [WrittenResult, WrittenOperand, WrittenWeight, OtherOperand, Flat])
def test_stays_apart(cls):
    gm = fxkit.symbolic_trace(cls().requires_grad_(False))
    assert not PassManager([MergeLayers()], args=(X,)).run(gm).modified


def test_nothing_is_merged_without_types():
    gm = fxkit.symbolic_trace(Gated())
    assert not PassManager([MergeLayers()]).run(gm).modified


def test_types_stay_true():
    gm = _captured(Attention(), (X,))
    merge(gm, X)
    recorded = {n.name: n.meta["fxkit_type"] for n in gm.graph.nodes if n.op != "output"}
    fxkit.propagate_types(gm, (X,))
    assert recorded == {n.name: n.meta["fxkit_type"] for n in gm.graph.nodes if n.op != "output"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name, before, after", [("bert", 13, 9), ("llama", 15, 9), ("vit", 14, 10)]
)
def test_real_architectures(name, before, after):
    model, inputs = HUGGING_FACE[name]()
    args = tuple(inputs(2).values())
    with torch.no_grad():
        gm = fxkit.capture(model, (), inputs(2)).graph_module
        assert calls(gm) == before
        merge(gm, *args)
    assert calls(gm) == after
