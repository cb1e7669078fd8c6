"""Passes that write to parameters: found, taken back where numbers are checked, and told of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxkit
from fxkit.errors import PostconditionError
from fxkit.passes import Canonicalise, DeadCodeElimination, pass_function
from fxkit.passes.manager.written_state import put_back, values_of, written_since

X = torch.randn(4, 3)


@pass_function(numerics="close")
def doubles_weights(edit, context):
    for parameter in edit.gm.parameters():
        parameter.data.mul_(2)


@pass_function(numerics="changed")
def says_that_it_does(edit, context):
    doubles_weights.apply(edit, context)


def for_torch_fx(module):
    with torch.no_grad():
        module.get_parameter("0.weight").add_(1)
    for node in module.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.nn.functional.relu6


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()).eval()


def test_numbers_are_checked_though_the_graph_is_the_same():
    gm = fxkit.symbolic_trace(model())
    before = copy.deepcopy(gm.state_dict())
    manager = fxkit.PassManager([doubles_weights], args=(X,), verify="numerics")
    with pytest.raises(PostconditionError) as raised:
        manager.run(gm)
    assert "writes to 0.weight, 0.bias" in raised.value.hint
    assert all(torch.equal(value, before[name]) for name, value in gm.state_dict().items())


@pass_function
def exchanges_layers(edit, context):
    edit.gm.get_submodule("0").bias = nn.Parameter(torch.ones(3))
    setattr(edit.gm, "0", nn.Sequential(nn.Linear(3, 3)))


def test_numbers_are_checked_though_layers_are_others():
    gm = fxkit.symbolic_trace(model())
    before, expected = dict(gm.named_parameters()), gm(X)
    manager = fxkit.PassManager([exchanges_layers], args=(X,), verify="numerics")
    with pytest.raises(PostconditionError) as raised:
        manager.run(gm)
    assert "writes to 0" in raised.value.hint
    assert list(map(id, gm.parameters())) == list(map(id, before.values()))
    assert torch.equal(gm(X), expected)


def test_the_next_pass_is_not_blamed():
    gm = fxkit.symbolic_trace(model())
    passes = [says_that_it_does, Canonicalise(), DeadCodeElimination()]
    fxkit.PassManager(passes, args=(X,), verify="numerics").run(gm)
    torch.testing.assert_close(gm.get_parameter("0.weight"), 2 * model()[0].weight)


@pytest.mark.parametrize("writer", [doubles_weights, for_torch_fx])
def test_bisection_finds_the_pass_and_leaves_the_program_alone(writer):
    module = model()
    gm = fxkit.symbolic_trace(module)
    expected = module(X)
    passes = [Canonicalise(), DeadCodeElimination(), writer, Canonicalise()]
    found = fxkit.PassManager(passes, args=(X,), verify="structure").bisect(
        gm, bad=lambda gm, args: not torch.allclose(gm(*args), expected)
    )
    assert found.in_pass == f"{writer.__name__} (3/4)"
    assert "it writes to 0.weight" in found.notes[0]
    assert torch.equal(module(X), expected)
    assert torch.allclose(found.before(X), expected)
    assert not torch.allclose(found.after(X), expected)


def test_a_rewrite_after_a_harmless_write_is_found_as_ever():
    @pass_function(numerics="changed")
    def relu_as_relu6(edit, context):
        for place in fxkit.graph(edit.gm).find(torch.relu):
            node = place.fx_node
            edit.replace(node, edit.call(torch.nn.functional.relu6, *node.args, before=node))

    gm = fxkit.symbolic_trace(model())
    passes = [says_that_it_does, relu_as_relu6]
    found = fxkit.PassManager(passes, args=(100 * X,), verify="structure").bisect(
        gm, bad=lambda gm, args: any(n.target is torch.nn.functional.relu6 for n in gm.graph.nodes)
    )
    assert (found.in_pass, found.rule) == ("relu_as_relu6 (2/2)", "relu_as_relu6")
    assert torch.equal(gm.get_parameter("0.weight"), model()[0].weight)


def test_values_that_are_no_numbers_are_the_same():
    module = nn.Module()
    module.register_buffer("x", torch.tensor([float("nan"), 1.0]))
    module.register_buffer("wide", torch.ones(1).expand(3))
    values = values_of(module)
    assert written_since(values) == ()
    module.x[1] = 2.0
    assert written_since(values) == ("x",)
    put_back(values)
    assert module.x[1] == 1.0
