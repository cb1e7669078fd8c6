"""What is no graph, and inputs that a graph has no place for, are told of at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxkit
from fxkit.errors import UnsupportedError

X = torch.randn(2, 3)


def traced():
    return fxkit.symbolic_trace(lambda x, scale=2.0: x * scale)


@pytest.mark.parametrize(
    "look",
    [
        fxkit.graph,
        fxkit.verify,
        lambda gm: fxkit.edit(gm).__enter__(),
        lambda gm: fxkit.propagate_types(gm, (X,)),
        lambda gm: fxkit.TypeAnalysis(gm, (X,)),
    ],
)
def test_what_is_no_graph_is_refused(look):
    for given in (nn.ReLU(), 3, None):
        with pytest.raises(UnsupportedError, match=r"expected a torch\.fx\.GraphModule") as raised:
            look(given)
        assert "fxkit.capture" in str(raised.value)


@pytest.mark.parametrize(
    "look",
    [lambda gm: fxkit.propagate_types(gm, (X,)), lambda gm: fxkit.TypeAnalysis(gm, (X,))],
)
def test_what_takes_graphs_alone_names_that_of_a_captured_program(look):
    with pytest.raises(UnsupportedError, match=r"pass its \.graph_module"):
        look(fxkit.capture(nn.ReLU(), (X,)))


def test_a_captured_program_serves_as_its_graph():
    captured = fxkit.capture(nn.ReLU(), (X,))
    assert fxkit.graph(captured) is fxkit.graph(captured.graph_module)
    fxkit.verify(captured)
    with fxkit.edit(captured) as edit:
        assert edit.gm is captured.graph_module


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (X, {}, r"expected a tuple of inputs, got Tensor\n  hint:  write \(x,\)"),
        (None, {}, "expected a tuple of inputs, got NoneType"),
        ((X, 2.0, X), {}, r"expected at most 2 inputs, got 3\n  hint:  the graph's inputs are x"),
        ((X,), {"y": 1}, "expected inputs among x, scale, each once, got y by name"),
        ((X, 2.0), {"scale": 1}, "got scale by name"),
    ],
)
def test_inputs_without_a_place_are_refused(args, kwargs, message):
    with pytest.raises(UnsupportedError, match=message):
        fxkit.propagate_types(traced(), args, kwargs)


def test_inputs_by_name_and_of_any_number_are_taken():
    fxkit.propagate_types(traced(), (X,), {"scale": 3.0})
    fxkit.propagate_types(fxkit.symbolic_trace(lambda *xs, **named: xs[0]), (X, X), {"y": X})
