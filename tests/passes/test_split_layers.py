"""Layers whose result is only used in parts, and that merging and splitting are inverse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxkit
from fxkit.passes import MergeLayers, SplitLayers
from fxkit.passes.manager.manager import PassManager
from tests.passes.test_merge_layers import Attention, Gated, X, calls


class Fused(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.all = nn.Linear(12, 10)
        self.take = take

    def forward(self, x):
        return [part.sin().sum(-1) for part in self.take(self.all(x))]


@pytest.mark.parametrize("take, parts", [
    (lambda y: y.split([4, 6], -1), 2),
    (lambda y: y.split(3, dim=2), 4),
    (lambda y: y.chunk(2, -1), 2),
    (lambda y: torch.chunk(y, 3, dim=2)[:2], 2),
    (lambda y: (y.narrow(-1, 0, 3), y.narrow(2, -5, 4)), 2),
    (lambda y: (torch.ops.aten.slice(y, -1, 2, 100), torch.ops.aten.slice(y, 2, -4, -1)), 2),
])  # fmt: skip
def test_split(take, parts):
    gm = fxkit.capture(Fused(take), (X,)).graph_module
    PassManager([SplitLayers()], verify="numerics", args=(X,)).run(gm)
    assert calls(gm) == parts
    assert calls(gm, "aten.split", "aten.chunk", "aten.narrow", "aten.slice") == 0


def test_new_weights_show_the_old_ones():
    module = Fused(lambda y: y.chunk(2, -1))
    gm = fxkit.capture(module, (X,)).graph_module
    PassManager([SplitLayers()], verify="numerics", args=(X,)).run(gm)
    made = [gm.get_parameter(n.target) for n in gm.graph.nodes if n.op == "get_attr"]
    old = [module.all.weight, module.all.bias]
    memories = {parameter.untyped_storage().data_ptr() for parameter in made}
    assert memories == {parameter.untyped_storage().data_ptr() for parameter in old}


@pytest.mark.parametrize("take", [
    lambda y: (y.narrow(-1, 0, 3), y),
    lambda y: (y.narrow(1, 0, 3), y.narrow(1, 3, 2)),
    lambda y: (y.narrow(-1, 0, 3).mul_(2), y.narrow(-1, 3, 3)),
    lambda y: (y[..., 0:10:2], y[..., 1:10:2]),
    lambda y: (y.narrow(-1, 0, 10),),
])  # fmt: skip
def test_stays_whole(take):
    gm = fxkit.capture(Fused(take).requires_grad_(False), (X,)).graph_module
    assert not PassManager([SplitLayers()], args=(X,)).run(gm).modified


def test_parts_that_the_caller_gets_stay_views():
    class Returned(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.Linear(12, 10)

        def forward(self, x):
            return tuple(self.all(x).split(5, -1))

    gm = fxkit.capture(Returned(), (X,)).graph_module
    result = PassManager([SplitLayers()], verify="numerics", args=(X,)).run(gm)
    assert not result.modified
    assert "memory layout" in result.records[0].notes[0]


@pytest.mark.parametrize("module, layers", [(Attention(4, 2), 3), (Gated(), 3)])
def test_merged_layers_come_apart_again(module, layers):
    gm = fxkit.capture(module, (X,)).graph_module
    PassManager([MergeLayers()], verify="numerics", args=(X,)).run(gm)
    assert calls(gm) == layers - (2 if layers == 3 and hasattr(module, "q") else 1)
    PassManager([SplitLayers()], verify="numerics", args=(X,)).run(gm)
    assert calls(gm) == layers
