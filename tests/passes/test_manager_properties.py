"""Each property: a graph that has it, and one that has not, with the reason and the line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.errors import PassError
from fxkit.passes import graph_property
from fxkit.passes.properties import PROPERTIES, property_named

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ADD = torch.ops.aten.add.Tensor


def written_at_the_end(x):
    y = torch.sin(x)
    x.copy_(y)
    return y


def written_and_used(x):
    x.copy_(torch.sin(x))
    return x + 1


def dequantised(x):
    quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    weight = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    return F.linear(quantised.dequantize(), weight.dequantize())


HOLDS = {
    "functional": [lambda x: x + 1, lambda x: torch.rand_like(x), written_at_the_end],
    "aten": [lambda x: ADD(x, ADD(x, x)), lambda x: ADD(x, x.shape[0])],
    "core_aten": [lambda x: ADD(x, x)],
    "normalized": [lambda x: torch.relu(torch.softmax(x, -1))],
    "known_operators": [lambda x: torch.relu(x) + x.shape[0]],
    "no_views": [lambda x: (x + 1).relu_()],
    "deterministic": [lambda x: F.dropout(x, 0.5, training=False)],
    "inference": [lambda x: F.dropout(x, 0.5, training=False) + x.shape[0]],
    "quantized": [dequantised, lambda x: x + 1],
}

FAILS = {
    "functional": [
        (lambda x: x.add_(1), "writes %x"),
        (lambda x: opaque_leaf(x), "nothing is known of it"),
        (written_and_used, "writes %x"),
    ],
    "aten": [
        (lambda x: torch.relu(x), "calls relu, no overload"),
        (lambda x: x.relu(), "calls the method .relu, no overload"),
        (nn.Sequential(nn.ReLU()), "calls the module 0, no overload"),
    ],
    "core_aten": [
        (
            lambda x: torch.ops.aten.silu.default(x),
            "aten.silu.default, which is not in the core set",
        )
    ],
    "normalized": [
        (lambda x: x.relu(), "calls the method .relu, no function"),
        (lambda x: torch.relu(input=x), "has an operand by keyword that goes by position"),
    ],
    "known_operators": [(lambda x: opaque_leaf(x), "of which nothing is known")],
    "no_views": [
        (lambda x: x.view(8), "may share memory with %x"),
        (lambda x: x.transpose(0, 1), "may share memory with %x"),
    ],
    "deterministic": [
        (lambda x: torch.rand_like(x), "may draw random numbers"),
        (lambda x: F.dropout(x, 0.5), "may draw random numbers"),
    ],
    "inference": [
        (lambda x: F.dropout(x, 0.5), "runs with train"),
        (nn.Sequential(nn.BatchNorm1d(4)), "runs with training=True"),
    ],
    "quantized": [(lambda x: x @ x.T, "takes its self in floating point")],
}


@torch.fx.wrap
def opaque_leaf(x):
    return x


def traced(program):
    return fxkit.symbolic_trace(program)


@pytest.mark.parametrize(
    ("name", "program"), [(name, program) for name, all_ in HOLDS.items() for program in all_]
)
def test_it_holds(name, program):
    assert property_named(name).check(traced(program)) is None


@pytest.mark.parametrize(
    ("name", "program", "reason"),
    [(name, program, why) for name, all_ in FAILS.items() for program, why in all_],
)
def test_it_does_not_hold_and_says_why(name, program, reason):
    violation = property_named(name).check(traced(program))
    assert violation is not None and reason in violation.reason
    assert violation.name == name and str(violation).startswith(f"not {name}: %")
    assert len(violation.nodes) == len(violation.lines) == len(violation.sources)


def test_the_line_of_the_user_is_told():
    violation = property_named("functional").check(traced(written_and_used))
    assert violation.sources[0].startswith("test_manager_properties.py:")
    assert violation.sources[0].endswith("in written_and_used")


def test_only_the_first_places_are_told():
    def many(x):
        for _ in range(9):
            x = x.view(8)
        return x

    violation = property_named("no_views").check(traced(many))
    assert len(violation.nodes) == 3 and violation.has_more
    assert violation.reason.endswith("; and more")


def test_shapes_are_known_once_they_are_propagated():
    gm = traced(lambda x: torch.relu(x))
    assert "has no recorded type" in property_named("shapes_known").check(gm).reason
    fxkit.propagate_types(gm, (X,))
    assert property_named("shapes_known").check(gm) is None


def test_channels_last():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return F.max_pool2d(self.conv(x), 2)

    gm = traced(Net())
    check = property_named("channels_last").check
    assert "of unknown type" in check(gm).reason
    fxkit.propagate_types(gm, (IMAGE,))
    assert "strides (192, 64, 8, 1)" in check(gm).reason
    fxkit.propagate_types(gm, (IMAGE.to(memory_format=torch.channels_last),))
    assert check(gm) is None


def test_every_property_is_described_and_tested():
    tested = {*HOLDS, "shapes_known", "channels_last"}
    assert set(PROPERTIES) == tested and set(FAILS) == set(HOLDS)
    assert all(known.summary.endswith(".") for known in PROPERTIES.values())


def test_two_properties_of_one_name_are_refused():
    with pytest.raises(PassError, match="expected one property named 'functional', got two"):

        @graph_property
        def functional(gm):
            """Another."""

    assert PROPERTIES["functional"].summary.startswith("Nothing is written to")
    with pytest.raises(PassError, match="expected the name of a property, got 'pretty'"):
        property_named("pretty")
