"""What a view looks at: graphs, what holds one, and programs that are captured for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.view.texts.subject import graph_module_of

X = torch.ones(2, 4)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()


def test_graphs_and_what_holds_one_are_taken_as_they_are() -> None:
    captured = fxkit.capture(model(), (X,))
    assert graph_module_of(captured.graph_module) is captured.graph_module
    assert graph_module_of(captured) is captured.graph_module


def test_a_module_or_function_is_captured_with_its_inputs() -> None:
    net = model()
    assert str(fxkit.tree(net, (X,))) == str(fxkit.tree(fxkit.capture(net, (X,)).graph_module))
    assert "drawn as 4 boxes" in repr(fxkit.draw(net, (X,)))
    profile = fxkit.profile(net, (X,), iters=1)
    assert {"linear", "relu"} <= {row.name for row in profile.rows}

    def scaled(x: torch.Tensor, *, by: float) -> torch.Tensor:
        return x * by

    assert "aten.mul" in str(fxkit.tree(scaled, (X,), {"by": 2.0}))


@pytest.mark.parametrize("look", [fxkit.tree, fxkit.draw])
def test_what_holds_no_graph_says_what_to_give(look) -> None:
    with pytest.raises(UnsupportedError, match="got Sequential") as caught:
        look(model())
    assert caught.value.hint == "give its inputs too, as a tuple, and it is captured"
    with pytest.raises(UnsupportedError, match="got int") as caught:
        look(3)
    assert "fxkit.capture(fn, args)" in caught.value.hint


def test_a_captured_sequential_keeps_the_names_of_its_parameters() -> None:
    net = model()
    graph_module = fxkit.capture(net, (X,)).graph_module
    assert set(graph_module.state_dict()) == set(net.state_dict())
    other = model()
    graph_module.load_state_dict(other.state_dict())
    torch.testing.assert_close(graph_module(X), other(X))
