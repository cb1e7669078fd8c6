"""Mode `partial`: Dynamo's graphs, why there are several, and one view over them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxkit
from fxkit.errors import CaptureError
from fxkit.tracing.partial import python_between

pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo warns about its own dependencies


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


LINEAR = nn.Linear(4, 4)


def in_pieces(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    print("between")
    z = y.sin() + x
    if z.sum() > 0:
        z = z + 1
    return LINEAR(z)


def test_pieces_are_the_program(capsys: pytest.CaptureFixture[str]):
    partial = fxkit.capture(in_pieces, (torch.ones(4),), mode="partial")
    for x in (torch.ones(4), -torch.ones(4), torch.rand(4)):
        torch.testing.assert_close(partial(x), in_pieces(x))
    assert capsys.readouterr().out == "between\n" * 7
    assert not partial.whole


def test_breaks_name_the_line_and_the_reason():
    partial = fxkit.capture(in_pieces, (torch.ones(4),), mode="partial")
    first = in_pieces.__code__.co_firstlineno
    assert len(partial.graphs) == 3 and len(partial.breaks) == 2
    assert partial.breaks[0].source == f"test_partial.py:{first + 2} in in_pieces"
    assert partial.breaks[1].source == f"test_partial.py:{first + 4} in in_pieces"
    assert "print" in partial.breaks[0].reason
    assert partial.explain().startswith("3 graphs, 2 breaks\n")


def test_one_view_over_all_pieces():
    partial = fxkit.capture(in_pieces, (torch.ones(4),), mode="partial")
    graph = partial.graph_module.graph
    graph.lint()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [n.meta["fxkit_break"] for n in calls if n.target is python_between] == partial.breaks
    product, sine = (next(n for n in graph.nodes if n.name == s) for s in ("y", "sin"))
    assert sine.args == (product,), "a tensor that goes from graph to graph is one node"
    inputs = list(graph.find_nodes(op="placeholder"))
    assert len(inputs) == 3, "the argument and the two parameters, each once"
    with pytest.raises(CaptureError, match="expected a view to be looked at"):
        partial.graph_module(torch.ones(4), LINEAR.weight, LINEAR.bias)


def test_what_python_makes_between_graphs_is_marked():
    def fn(x: torch.Tensor) -> torch.Tensor:
        values = (x * 2).tolist()
        return torch.tensor(values) + x

    partial = fxkit.capture(fn, (torch.ones(2),), mode="partial")
    torch.testing.assert_close(partial(torch.ones(2)), torch.full((2,), 3.0))
    partial.graph_module.graph.lint()


def test_whole_program():
    partial = fxkit.capture(lambda x: x.sin() * 2, (torch.ones(4),), mode="partial")
    assert partial.whole and partial.breaks == []
    torch.testing.assert_close(partial.graph_module(torch.ones(4))[0], torch.ones(4).sin() * 2)


def test_gradients_flow_through_pieces():
    x = torch.ones(4, requires_grad=True)
    partial = fxkit.capture(in_pieces, (x,), mode="partial")
    (found,) = torch.autograd.grad(partial(x).sum(), x)
    (expected,) = torch.autograd.grad(in_pieces(x).sum(), x)
    torch.testing.assert_close(found, expected)
