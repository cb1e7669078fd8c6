"""Nodes that turn data into numbers or shapes, and that they stay outside of submodules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxkit
from fxkit.ir.node_kinds import body_of
from fxkit.ir.types import set_type
from fxkit.passes import (
    ActivationCheckpointing,
    Partition,
    SplitByCallback,
    SplitByDevice,
    SplitBySize,
)
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.partitioning.data_reads import reads_data

X = torch.linspace(-2.0, 2.0, 16).reshape(4, 4)


def f(x):
    return x.sum().item(), bool(x.all()), torch.equal(x, x), x.shape[0], x.nonzero(), x.exp()


def test_numbers_and_shapes_of_data_are_told_from_the_rest():
    with torch.no_grad():
        gm = fxkit.capture(lambda x: [f(x)[i] for i in (4, 5)], (X,)).graph_module
    read = {n.name for n in body_of(gm.graph) if reads_data(n)}
    assert {"item", "bool_1", "equal", "nonzero"} <= read
    assert not {"sum_1", "all_1", "exp"} & read


def test_a_size_is_no_data():
    gm = fxkit.symbolic_trace(lambda x: x.reshape(x.shape[0], -1))
    assert not any(reads_data(n) for n in body_of(gm.graph))
    graph = torch.fx.Graph()
    number = graph.placeholder("number")
    set_type(number, 3)
    assert not reads_data(graph.call_function(float, (number,)))


class Guarded(nn.Module):
    """Asks for a number in the midst of the layers, as attention masks do."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = torch.tanh(self.first(x)).exp()
        y = torch.tanh(self.second(y)).exp()
        if bool((x < 9).all()):
            y = torch.tanh(self.third(y)).exp()
        return y.square()


@pytest.mark.parametrize(
    "change",
    [Partition(), SplitBySize(parts=2), SplitByCallback(), SplitByDevice(),
     ActivationCheckpointing()],
    ids=lambda change: change.name,
)  # fmt: skip
def test_a_captured_model_that_reads_data_keeps_types_numbers_and_gradients(change):
    torch.manual_seed(0)
    gm = fxkit.capture(Guarded(), (X,)).graph_module
    before = copy.deepcopy(gm)
    PassManager([change], verify="each", args=(X,)).run(gm)
    assert [n.op for n in body_of(gm.graph)].count("call_module") >= 1
    reads = [n for n in body_of(gm.graph) if reads_data(n)]
    assert len(reads) == 1
    results = [module(X) for module in (before, gm)]
    assert torch.equal(*results)
    for module, result in zip((before, gm), results, strict=True):
        module.zero_grad()
        result.sum().backward()
    after = dict(gm.named_parameters())
    for name, parameter in before.named_parameters():
        torch.testing.assert_close(parameter.grad, after[name].grad)
