"""Parts of graphs: cut out, outlined, inlined."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxkit
from fxkit.analysis.slices import boundary, extract, inline, outline
from fxkit.errors import FxkitError, InvalidGraphError, RewriteError
from fxkit.ir.printer import format_graph


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x, y):
        a = torch.relu(self.fc(x))
        b = a * self.scale
        c = torch.exp(y) + a
        return b.sum() + c, b


X, Y = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gm():
    return fxkit.symbolic_trace(Model())


def nodes(gm, *names):
    return [n for n in gm.graph.nodes if n.name in names]


def test_boundary(gm):
    part = boundary(nodes(gm, "relu", "mul"))
    assert [n.name for n in part.inputs] == ["fc", "scale"]
    assert [n.name for n in part.outputs] == ["relu", "mul"]


def test_extract_computes_the_same(gm):
    part = extract(gm, nodes(gm, "fc", "relu", "mul"))
    model = Model()
    relu, mul = part(X)
    assert torch.equal(relu, torch.relu(model.fc(X)))
    assert torch.equal(mul, torch.relu(model.fc(X)) * model.scale)
    assert part.scale is gm.scale, "parameters are shared"


def test_extract_refuses_inputs_and_nothing(gm):
    for names in ((), ("x",), ("output",)):
        with pytest.raises(InvalidGraphError, match="expected nodes that compute something"):
            extract(gm, nodes(gm, *names))


@pytest.mark.parametrize(
    "names",
    [("fc", "relu"), ("relu", "mul"), ("exp",), ("mul", "add"), ("fc", "relu", "mul", "sum_1")],
)
def test_outline_and_inline_keep_the_meaning(gm, names):
    expected = gm(X, Y)
    before = {n.name for n in gm.graph.nodes}
    call = outline(gm, nodes(gm, *names), "part")
    assert call.op == "call_module" and isinstance(gm.part, torch.fx.GraphModule)
    assert not [n for n in gm.graph.nodes if n.op != "call_function" and n.name in names]
    for found, wanted in zip(gm(X, Y), expected, strict=True):
        assert torch.equal(found, wanted)
    inline(gm, "part")
    assert not gm.graph.find_nodes(op="call_module", target="part")
    for found, wanted in zip(gm(X, Y), expected, strict=True):
        assert torch.equal(found, wanted)
    assert len(gm.graph.nodes) <= len(before) + 1


def test_outline_refuses_a_part_that_is_entered_again(gm):
    text = format_graph(gm)
    with pytest.raises(RewriteError, match="through %relu"):
        outline(gm, nodes(gm, "fc", "mul"), "part")
    assert format_graph(gm) == text


def test_outline_does_not_move_a_user_over_a_write():
    def f(x):
        a = x * 2
        b = a + x
        x.add_(1)
        return b, x * 3

    gm = fxkit.symbolic_trace(f)
    with pytest.raises(RewriteError, match="got an effect"):
        outline(gm, nodes(gm, "mul", "add_", "mul_1"), "part")


def test_inline_refuses_other_modules(gm):
    with pytest.raises(RewriteError, match="got Linear"):
        inline(gm, "fc")
    with pytest.raises(FxkitError, match="got none"):
        inline(gm, "nothing")


def test_paths_cut_distance(gm):
    g = fxkit.graph(gm)
    paths = g.paths(g["fc"], g["add_1"])
    assert [[n.name for n in path] for path in paths] == [
        ["fc", "relu", "mul", "sum_1", "add_1"],
        ["fc", "relu", "add", "add_1"],
    ]
    assert len(g.cut([g["x"]], [g["output"]])) == 1
    cut = g.cut([g["x"], g["y"]], [g["add"], g["sum_1"]])
    assert len(cut) == 2 and {n.name for n in cut} <= {
        "x",
        "fc",
        "relu",
        "y",
        "exp",
        "add",
        "sum_1",
    }
    assert g.distance(g["fc"], g["add_1"]) == 3
    assert g.distance(g["y"], g["mul"]) is None
    assert g.boundary([g["relu"], g["mul"]]) == ([g["fc"], g["scale"]], [g["relu"], g["mul"]])
