"""Mixed precision of our own: as accurate as autocast with fewer casts, and sound at its edges."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import fxkit
from fxkit.ir.provenance import source_of
from fxkit.ir.types import type_of
from fxkit.passes import Autocast, MixedPrecision
from fxkit.passes.manager.manager import PassManager
from tests.architectures import HUGGING_FACE

X = torch.linspace(-2.0, 2.0, 24).reshape(4, 6)
W = torch.linspace(-1.0, 1.5, 36).reshape(6, 6)


def lowered(function, args, **options):
    gm = fxkit.symbolic_trace(function)
    PassManager([MixedPrecision(**options)], verify="structure", args=args).run(gm)
    return gm


def casts(gm):
    taken = [n.args[0] for n in gm.graph.nodes if n.target == "to"]
    return [str(n.target) if n.op == "get_attr" else n.name for n in taken]


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.q(x) + self.k(x)


def test_a_value_is_cast_once_and_weights_ahead():
    torch.manual_seed(0)
    model = Projections().eval()
    with torch.no_grad():
        gm = lowered(model, (X,))
    assert casts(gm) == ["x", "add"]
    assert gm.q_weight_bfloat16.dtype == torch.bfloat16
    assert torch.equal(gm.q.weight, model.q.weight), "the user's weights stay as they are"
    x = X.bfloat16()
    low = copy.deepcopy(model).bfloat16()
    assert torch.equal(gm(X), (low.q(x) + low.k(x)).float())


def test_weights_that_are_trained_are_cast_in_the_graph():
    gm = lowered(Projections().train(), (X,))
    assert sorted(casts(gm)) == ["add", "k.bias", "k.weight", "q.bias", "q.weight", "x"]
    gm(X).sum().backward()
    assert gm.q.weight.grad.dtype == torch.float32
    assert gm.q.weight.grad.abs().sum() > 0


def test_weights_in_eval_mode_that_need_a_gradient_are_cast_in_the_graph_too():
    gm = fxkit.symbolic_trace(Projections().eval())
    PassManager([MixedPrecision()], args=(X,)).run(gm)
    assert "q.weight" in casts(gm)
    assert gm(X).requires_grad


def test_a_value_cast_up_and_down_again_is_not_cast():
    gm = lowered(lambda x, w: (x @ w).float() @ w, (X, W))
    products = [n for n in gm.graph.nodes if "matmul" in n.name and n.op != "placeholder"]
    assert products[1].args[0] is products[0]


def test_what_is_delicate_is_computed_in_float32():
    def f(x, w):
        y = x @ w
        return y.sum(), torch.exp(y), torch.cumsum(y, 0), F.mse_loss(y, x), F.softmax(y, -1), y * 2

    gm = lowered(f, (X, W), keep_output_types=False)
    low, wide = torch.bfloat16, torch.float32
    assert [t.dtype for t in gm(X, W)] == [wide, wide, wide, wide, low, low]
    product = (X.bfloat16() @ W.bfloat16()).float()
    assert torch.equal(gm(X, W)[0], product.sum())
    assert casts(gm).count("matmul") == 1, "cast up once for all"


def test_a_value_written_in_between_is_cast_again():
    def f(x, w):
        y = x.clone()
        a = y @ w
        y.add_(1)
        return a, y @ w

    gm = lowered(f, (X, W))
    assert casts(gm).count("clone") + casts(gm).count("add_") == 2
    first, second = gm(X, W)
    assert torch.equal(first, (X.bfloat16() @ W.bfloat16()).float())
    assert torch.equal(second, ((X + 1).bfloat16() @ W.bfloat16()).float())


def test_operators_that_want_equal_dtypes_get_them():
    def f(x, w):
        y = x @ w
        return torch.lerp(y, x, 0.5), torch.where(x > 0, y, x), torch.addcmul(x, y, y)

    gm = lowered(f, (X, W))
    product = (X.bfloat16() @ W.bfloat16()).float()
    assert torch.equal(gm(X, W)[0], torch.lerp(product, X, 0.5))


def test_other_dtypes_and_switched_off_parts_stay():
    def f(x, w, d):
        with torch.autocast("cpu", enabled=False):
            a = x @ w
        return a, d @ d.t(), torch.arange(4) @ torch.arange(4)

    with torch.autocast("cpu", torch.bfloat16):
        gm = fxkit.capture(f, (X, W, X.double())).graph_module
    PassManager([MixedPrecision()], args=(X, W, X.double())).run(gm)
    assert torch.equal(gm(X, W, X.double())[0], X @ W)
    assert casts(gm) == []


def test_small_products_stay_on_request():
    gm = lowered(lambda x, w: x @ w, (X, W), min_elements=1000)
    assert casts(gm) == []


def test_types_and_sources_are_kept():
    with torch.no_grad():
        gm = lowered(Projections().eval(), (X,))
    called = [n for n in gm.graph.nodes if n.op.startswith("call")]
    assert all(source_of(n) is not None and type_of(n) is not None for n in called)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_architecture_is_as_accurate_as_with_autocast_and_has_fewer_casts(name):
    torch.manual_seed(0)
    model, inputs_of = HUGGING_FACE[name]()
    inputs = inputs_of(2)
    args = tuple(pytree.tree_leaves(inputs))
    with torch.no_grad():
        graphs = [
            fxkit.capture(lambda **k: model(**k)[0], (), inputs).graph_module for _ in range(2)
        ]
        for gm, pass_ in zip(graphs, (Autocast(), MixedPrecision()), strict=True):
            PassManager([pass_], args=args).run(gm.eval())
        exact = copy.deepcopy(model).double()(**inputs)[0]
        theirs, ours = ((gm(*args).double() - exact).norm() for gm in graphs)
    assert ours <= 1.2 * theirs
    assert len(casts(graphs[1])) <= 0.6 * len(casts(graphs[0]))


def test_products_that_are_left_take_float32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).eval()
    with torch.no_grad():
        gm = lowered(model, (X,), where=lambda node: node.target in ("0", F.linear))
        low = copy.deepcopy(model[0]).bfloat16()
        wanted = model[2](low(X.bfloat16()).relu().float())
        torch.testing.assert_close(gm(X), wanted, rtol=0, atol=0)
        small = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 1)).eval()
        gm = lowered(small, (X,), min_elements=300)
        low = copy.deepcopy(small[0]).bfloat16()
        torch.testing.assert_close(gm(X), small[1](low(X.bfloat16()).float()))
