"""Modules that are pickled come back with the graph they had, node by node."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx._symbolic_trace import PH

import fxkit
from fxkit import passes as p
from tests.architectures import HUGGING_FACE


def many_kinds(x: torch.Tensor, start: int = 2) -> dict[str, Any]:
    y = (x * 2 if x.sum() > 0 else x)[start:, None] ** 2
    z = F.pad(x, (1, -1), value=1e-3).clone()
    z[1:3] = 4
    z += -y.sum()
    z @= torch.eye(8)
    with torch.no_grad():
        w = z.shape[0] * z
    return {"a": [y, w, (~(z > 1))], "b": torch.stack([x, z]).to(torch.float64), "c": (y.T, None)}


def net() -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), inner)


X = torch.ones(8)
MODULES: dict[str, Callable[[], fx.GraphModule]] = {
    "captured": lambda: fxkit.capture(many_kinds, (X,)).graph_module,
    "traced": lambda: fxkit.symbolic_trace(net()),
    "captured net": lambda: fxkit.capture(net(), (X[None].repeat(4, 1),)).graph_module,
    "aten": lambda: fxkit.capture(net().eval(), (X[None],), mode="aten").graph_module,
}


def lines(gm: fx.GraphModule) -> list[str | None]:
    return [node.format_node() for node in gm.graph.nodes]


def again(gm: fx.GraphModule) -> fx.GraphModule:
    return pickle.loads(pickle.dumps(gm))


@pytest.mark.parametrize("name", MODULES)
def test_graphs_are_as_they_were(name: str) -> None:
    gm = MODULES[name]()
    loaded = again(gm)
    assert lines(loaded) == lines(gm) == lines(again(loaded))
    assert loaded.state_dict().keys() == gm.state_dict().keys()


def test_random_numbers_are_drawn_at_each_call() -> None:
    gm = fxkit.symbolic_trace(nn.Dropout(0.5))
    fxkit.PassManager([p.DecomposeToCore()], args=(X,)).run(gm)
    loaded = again(gm)
    assert lines(loaded) == lines(gm)
    torch.manual_seed(0)
    expected = [gm(X) for _ in range(3)]
    torch.manual_seed(0)
    torch.testing.assert_close([loaded(X) for _ in range(3)], expected)


def test_guards_are_asked_at_each_call() -> None:
    loaded = again(fxkit.capture(many_kinds, (X,)).graph_module)
    torch.testing.assert_close(loaded(X), list(fxkit.capture(many_kinds, (X,)).graph_module(X)))
    with pytest.raises(fxkit.errors.CaptureError):
        loaded(-X)


@pytest.mark.parametrize("chosen", [p.SplitBySize(), p.ActivationCheckpointing(budget=0)], ids=str)
def test_parts_of_a_graph(chosen: fxkit.passes.Pass) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    gm = fxkit.symbolic_trace(net().eval())
    fxkit.PassManager([chosen], args=(x,)).run(gm)
    loaded = again(gm)
    assert lines(loaded) == lines(gm)
    torch.testing.assert_close(loaded(x), gm(x))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_real_graphs(name: str) -> None:
    module, inputs = HUGGING_FACE[name]()
    gm = fxkit.capture(module, (), inputs(2)).graph_module
    assert lines(again(gm)) == lines(gm)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about its own
def test_code_of_another_kind_is_followed_as_torch_does() -> None:
    gm = fx.symbolic_trace(lambda pair: pair[0] * pair[1], concrete_args={"pair": (PH, PH)})
    with fxkit.edit(gm) as edit:
        edit.rename(next(iter(gm.graph.nodes)), "first")
    assert torch.equal(again(gm)((X, X * 2)), X * 2)
