"""Channels innermost: how far it spreads, and that nobody outside can tell."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.ir.op import resolve
from fxkit.passes import ChannelsLast
from fxkit.passes.layout.layout_propagation import is_channels_last
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.properties import property_named
from tests.architectures import convolutional

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # by torch.export

X = torch.randn(2, 3, 8, 10, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2)
        self.norm, self.up = nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 5, 2, 2)
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.a(x))) + 1, 2)
        x = self.up(F.silu(self.b(x)))
        return self.last(x.mean((2, 3))), x


def copies(gm):
    calls = [resolve(n) for n in gm.graph.nodes]
    return sum(
        call is not None and call.name in ("aten.contiguous", "aten.clone") for call in calls
    )


def spread(gm, *args):
    """Run the pass, checking numbers, gradients and types, strides among them."""
    result = PassManager([ChannelsLast()], verify="numerics", args=args).run(gm)
    return result.records[0]


def _traced(module):
    return fxkit.symbolic_trace(module)


def _captured(module):
    return fxkit.capture(module, (X,)).graph_module


def _exported(module):
    return torch.export.export(module, (X,)).module()


def _decomposed(module):
    return torch.export.export(module, (X,)).run_decompositions().module()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [_traced, _captured, _exported, _decomposed])
def test_one_copy_in_and_one_out(make):
    gm = make(Net().eval())
    before = copies(gm)
    assert spread(gm, X).modified
    assert copies(gm) == before + 2
    fxkit.propagate_types(gm, (X,))
    assert property_named("channels_last").check(gm) is None
    assert gm(X)[1].is_contiguous()


def test_weights_are_converted_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.conv(torch.relu(self.conv(x))).sum()

    module = Twice()
    gm = fxkit.symbolic_trace(module)
    spread(gm, X)
    reads = {n.target for n in gm.graph.nodes if n.op == "get_attr"}
    assert len([name for name in reads if "weight" in name]) == 1
    assert module.conv.weight.is_contiguous()


def test_images_that_are_so_already_are_not_copied():
    gm = fxkit.symbolic_trace(Net().eval())
    x = X.to(memory_format=torch.channels_last)
    assert spread(gm, x).modified
    assert copies(gm) == 0


def test_second_run_changes_nothing():
    gm = fxkit.symbolic_trace(Net().eval())
    result = PassManager([ChannelsLast(), ChannelsLast()], args=(X,)).run(gm)
    assert [record.modified for record in result.records] == [True, False]


class After(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3), function

    def forward(self, x):
        return self.function(self.conv(x))


@pytest.mark.parametrize("function", [
    lambda y: y.view(2, -1).sin(),
    lambda y: y.flatten(1).sin(),
    lambda y: y.as_strided((5,), (3,)).sin(),
    lambda y: y.contiguous().view(-1) + 1,
    lambda y: y.permute(0, 2, 3, 1).reshape(2, -1, 4) + 1,
    lambda y: y.stride()[0] + y.sum(),
    lambda y: F.dropout(y, 0.5, True),
    lambda y: torch.rand_like(y) + y,
    lambda y: torch.cat([y, y], 1)[:, 1:3],
    lambda y: y.relu_().mul_(2).sin(),
    lambda y: F.interpolate(y, scale_factor=2.0),
    lambda y: (y, y.view(-1)),
    lambda y: y.transpose(2, 3),
])  # fmt: skip
def test_what_follows_gets_what_it_needs(function):
    gm = fxkit.capture(After(function), (X,)).graph_module
    spread(gm, X)


def test_what_was_written_before_it_is_read_is_brought_back():
    gm = fxkit.capture(After(lambda y: y.mul_(2).view(-1).sin()), (X,)).graph_module
    assert spread(gm, X).modified


def test_write_through_a_view_leaves_all_as_it_is():
    def function(y):
        y.view(-1).mul_(2)
        return y.sin()

    gm = fxkit.capture(After(function).requires_grad_(False), (X,)).graph_module
    record = spread(gm, X)
    assert not record.modified
    assert "written to" in record.notes[0]


def test_image_written_between_two_convolutions():
    class Written(Net):
        def forward(self, x):
            x = x * 2
            y = self.a(x)
            x.add_(1)
            return y.sum() + self.a(x).sum()

    gm = fxkit.symbolic_trace(Written())
    spread(gm, X)
    assert copies(gm) == 2


def test_nothing_without_types_or_convolutions():
    assert not PassManager([ChannelsLast()]).run(fxkit.symbolic_trace(Net())).modified
    assert not spread(fxkit.symbolic_trace(nn.Linear(10, 4)), X).modified


def test_the_layout_of_images():
    for x, wanted in ((X, False), (X.to(memory_format=torch.channels_last), True)):
        assert is_channels_last(fxkit.ir.types.TensorType.of(x)) is wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["resnet20_cifar10"])
def test_network(name):
    model, inputs = convolutional(name, 32)
    args = tuple(inputs(2).values())
    with torch.no_grad():
        gm = fxkit.capture(model, args).graph_module
        assert spread(gm, *args).modified
    assert copies(gm) == 1
    assert property_named("channels_last").check(gm) is None


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mobilenetv2_w1", "shufflenetv2_w1", "densenet121"])
def test_larger_network(name):
    model, inputs = convolutional(name)
    args = tuple(inputs(1).values())
    with torch.no_grad():
        gm = fxkit.capture(model, args).graph_module
        assert spread(gm, *args).modified
