"""Graph objects: find, follow, dominate; against brute force on random graphs."""

from __future__ import annotations

import itertools
import operator
import tracemalloc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxkit.analysis.dependencies import EffectOrder, ancestors, descendants
from fxkit.analysis.editing import edit
from fxkit.analysis.liveness import Liveness
from fxkit.analysis.objects import Graph, graph
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import FxkitError, InvalidGraphError
from fxkit.tracing.symbolic import symbolic_trace


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x)) + x


def _model() -> fx.GraphModule:
    gm = symbolic_trace(nn.Sequential(_Layer(), nn.ReLU(), _Layer()))
    propagate_types(gm, (torch.randn(2, 4),))
    return gm


@pytest.mark.parametrize(
    "spelling",
    [F.relu, torch.relu, nn.ReLU, "relu", "aten.relu", torch.ops.aten.relu.default,
     torch.Tensor.relu],
)  # fmt: skip
def test_find_in_every_spelling(spelling: Any) -> None:
    assert len(graph(_model()).find(spelling)) == 3


@pytest.mark.parametrize(
    ("wanted", "message", "hint"),
    [
        ({"operator": [torch.relu]}, "expected an operator, got list", "call find for each"),
        ({"operator": 3}, "expected an operator, got int 3", "'relu'"),
        ({"dtype": "float64"}, "expected a torch.dtype, got str", "dtype=torch.float64"),
        ({"dtype": float}, "expected a torch.dtype, got type", "dtype=torch.float"),
    ],
)
def test_find_refuses_what_no_node_can_be(wanted: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(FxkitError, match=message) as refused:
        graph(_model()).find(**wanted)
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize("name", [slice(1, 3), 3, ["relu"], None])
def test_a_node_is_asked_for_by_its_name(name: Any) -> None:
    with pytest.raises(FxkitError, match="expected the name of a node") as refused:
        graph(_model())[name]
    assert refused.value.hint


def test_a_cut_needs_two_sides() -> None:
    g = graph(_model())
    with pytest.raises(FxkitError, match="got no sources"):
        g.cut([], ["output"])
    with pytest.raises(FxkitError, match="got no targets"):
        g.cut(g.inputs, [])


def test_find_by_place_line_type_and_predicate() -> None:
    g = graph(_model())
    relu = g.find(torch.relu)
    assert [n.module_path for n in relu] == ["0", "1", "2"]
    assert g.find(torch.relu, module="[02]") == [relu[0], relu[2]]
    assert [n.operator for n in g.find(module="2*")] == ["aten.linear", "aten.relu", "aten.add"]
    line = relu[0].source
    assert line is not None
    assert relu[0] in g.find(source=f"test_objects.py:{line.line}")
    assert relu[1] not in g.find(source=f"test_objects.py:{line.line}")
    assert not g.find(source="objects.py")
    assert len(g.find(operator.add, shape=(None, 4))) == 2
    assert not g.find(shape=(4,))
    assert g.find(torch.relu, dtype=torch.float32) == relu
    assert not g.find(dtype=torch.float64)
    assert g.find(where=lambda n: n.name == relu[1].name) == [relu[1]]


def test_nodes_tell_their_arguments_and_neighbours() -> None:
    g = graph(_model())
    (add, _) = g.find(torch.add)
    assert add.arguments["alpha"] == 1
    assert add.arguments["other"] is g.inputs[0]
    assert add.producers == [g.find(torch.relu)[0], g.inputs[0]]
    assert add.users == [g.find(torch.relu)[1]]
    assert add.shape == (2, 4)
    assert len(g) == len(list(g)) == 9
    assert g.outputs == [g.find(torch.add)[1]]
    assert add.name in g and "nowhere" not in g
    assert repr(add).startswith(f"%{add.name}: f32[2,4] = aten.add(")


def test_unknown_name_is_an_error_with_neighbours() -> None:
    g = graph(_model())
    with pytest.raises(FxkitError, match="got 'inptu_1'") as caught:
        g["inptu_1"]
    assert "did you mean input_1" in str(caught.value)


def test_changes_are_noticed() -> None:
    gm = _model()
    g = graph(gm)
    assert graph(gm) is g
    node = g.find(torch.relu)[0].fx_node
    with edit(gm) as session:
        new = session.call(torch.sin, node.args[0], before=node)
        session.replace(node, new)
    assert not g.is_current()
    fresh = graph(gm)
    assert fresh is not g and len(fresh.find(torch.relu)) == 2
    with pytest.raises(InvalidGraphError, match="got a new %sin"):
        _ = g.find(torch.add)[0].producers
    for change in (
        lambda: setattr(new, "target", torch.cos),
        lambda: new._rename("other"),
        lambda: setattr(new, "args", (next(iter(gm.graph.nodes)),)),
    ):
        current = graph(gm)
        change()
        assert not current.is_current()
        assert graph(gm) is not current


@st.composite
def _dags(draw: st.DrawFn) -> fx.GraphModule:
    made = fx.Graph()
    nodes = [made.placeholder(f"p{index}") for index in range(draw(st.integers(1, 2)))]
    for _ in range(draw(st.integers(1, 9))):
        operands = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3))
        nodes.append(made.call_function(torch.stack, (operands,)))
    ends = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2))
    made.output(tuple(ends))
    return fx.GraphModule(nn.Module(), made)


def _reaches(first: fx.Node, last: fx.Node, without: fx.Node | None = None) -> bool:
    if first is without:
        return False
    return first is last or any(_reaches(user, last, without) for user in first.users)


_DRAWN = settings(deadline=None, derandomize=True, database=None, max_examples=60)


@_DRAWN
@given(_dags())
def test_cones_are_those_of_brute_force(gm: fx.GraphModule) -> None:
    nodes = list(gm.graph.nodes)
    for a, b in itertools.product(nodes, nodes):
        expected = a is not b and _reaches(a, b)
        assert (a in ancestors([b])) == expected
        assert (b in descendants([a])) == expected


def _immediate(node: fx.Node, starts: list[fx.Node], nodes: list[fx.Node]) -> fx.Node | None:
    """The dominator that all other dominators dominate, by taking nodes away."""

    def dominates(d: fx.Node, n: fx.Node) -> bool:
        return d is not n and not any(_reaches(s, n, without=d) for s in starts)

    found = [d for d in nodes if any(_reaches(s, d) for s in starts) and dominates(d, node)]
    return next((d for d in found if all(o is d or dominates(o, d) for o in found)), None)


@_DRAWN
@given(_dags())
def test_dominators_are_those_of_brute_force(gm: fx.GraphModule) -> None:
    g = Graph(gm)
    nodes = list(gm.graph.nodes)
    starts = [node for node in nodes if not node.all_input_nodes]
    found = {k.fx_node: v.fx_node for k, v in g.dominators().items()}
    for node in nodes:
        assert found.get(node) is _immediate(node, starts, nodes)


def test_an_empty_graph_has_no_dominators() -> None:
    g = Graph(fx.GraphModule(torch.nn.Module(), fx.Graph()))
    assert g.dominators() == g.post_dominators() == {}


@_DRAWN
@given(_dags(), st.randoms(use_true_random=False))
def test_convexity_is_that_of_brute_force(gm: fx.GraphModule, random: Any) -> None:
    g = Graph(gm)
    nodes = list(gm.graph.nodes)
    chosen = [node for node in nodes if random.random() < 0.4]
    outside = [node for node in nodes if node not in chosen]
    leaves = any(_reaches(a, o) and _reaches(o, b) for a in chosen for b in chosen for o in outside)
    assert g.is_convex(g[node.name] for node in chosen) == (not leaves)


@_DRAWN
@given(_dags())
def test_liveness_is_that_of_brute_force(gm: fx.GraphModule) -> None:
    nodes = list(gm.graph.nodes)
    live = Liveness(gm.graph)
    for index, node in enumerate(nodes):
        users = [nodes.index(user) for user in node.users]
        assert live.last_use(node) is (nodes[max(users)] if users else node)
        expected = [n for n in nodes[: index + 1] if any(u in nodes[index + 1 :] for u in n.users)]
        assert live.live_after(node) == expected


@_DRAWN
@given(_dags(), st.integers(0, 8))
def test_paths_are_those_of_brute_force(gm: fx.GraphModule, limit: int) -> None:
    nodes = list(gm.graph.nodes)

    def follow(path: list[fx.Node], end: fx.Node) -> list[list[fx.Node]]:
        if path[-1] is end:
            return [path]
        return [whole for user in path[-1].users for whole in follow([*path, user], end)]

    g = graph(gm)
    for start, end in itertools.product(nodes[:3], nodes[-3:]):
        got = [[view.fx_node for view in path] for path in g.paths(start, end, limit)]
        assert got == follow([start], end)[:limit]


def test_a_long_path_is_followed_in_memory_of_its_length() -> None:
    chained = fx.Graph()
    value = chained.placeholder("x")
    for _ in range(3000):
        value = chained.call_function(torch.add, (value, chained.call_function(F.relu, (value,))))
    chained.output(value)
    g = graph(fx.GraphModule(nn.Module(), chained))
    g.between("x", "output")
    tracemalloc.start()
    (path,) = g.paths("x", "output", limit=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(path) > 3000
    assert peak < 10_000_000


def test_peak_of_memory() -> None:
    gm = symbolic_trace(lambda x: torch.exp(torch.sin(x) + 1).view(-1).sum())
    propagate_types(gm, (torch.randn(10, 10),))
    peak, where = Liveness(gm.graph).peak_bytes()
    assert peak == 2 * 400
    assert where is not None and where.name in ("add", "exp")


def test_effects_order_nodes() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = torch.sin(x)
        view = x[0]
        view.add_(1)
        b = torch.cos(x)
        c = torch.exp(y)
        d = torch.rand_like(y)
        e = torch.rand_like(y)
        return a, b, c, d, e

    gm = symbolic_trace(program)
    n = {node.name: node for node in gm.graph.nodes}
    order = EffectOrder(gm.graph)
    assert not order.may_swap(n["sin"], n["add_"])
    assert not order.may_swap(n["add_"], n["cos"])
    assert order.may_swap(n["add_"], n["exp"])
    assert order.may_swap(n["sin"], n["exp"])
    assert not order.may_swap(n["rand_like"], n["rand_like_1"])
    assert order.may_swap(n["rand_like"], n["sin"])
    assert order.written_between(n["x"], n["sin"], n["cos"]) is n["add_"]
    assert order.written_between(n["x"], n["cos"], n["exp"]) is None
    assert order.written_between(n["y"], n["sin"], n["cos"]) is None
    assert [view.name for view in graph(gm).effects()] == ["add_", "rand_like", "rand_like_1"]


@pytest.mark.parametrize("layer", [nn.ReLU, nn.Hardtanh, nn.SiLU, nn.ELU, nn.Dropout])
def test_the_class_of_a_layer_finds_it_in_both_forms(layer: Any) -> None:
    gm = symbolic_trace(nn.Sequential(layer(inplace=True), nn.Linear(2, 2), layer()).eval())
    assert len(graph(gm).find(layer)) == 2


@pytest.mark.parametrize(
    ("name", "near"), [("aten.geluu", "aten.gelu"), ("rellu", "aten.relu"), ("aten.ad", "aten.add")]
)
def test_a_name_that_no_operator_has_is_refused(name: str, near: str) -> None:
    g = graph(symbolic_trace(lambda x: torch.relu(x)))
    with pytest.raises(FxkitError, match=rf"got '{name}', which none has") as caught:
        g.find(name)
    assert near in str(caught.value)


@pytest.mark.parametrize("name", ["aten.gelu", "gelu", "aten.add_out", "aten.relu_", "mine.op"])
def test_a_name_of_an_operator_that_a_graph_lacks_finds_nothing(name: str) -> None:
    assert graph(symbolic_trace(lambda x: torch.tanh(x))).find(name) == []
