"""Types are kept true by journals, and only what an edit can change is visited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxkit.analysis.editing import edit
from fxkit.analysis.objects import graph
from fxkit.analysis.tensor_types import TypeAnalysis, propagate_types
from fxkit.errors import InvalidGraphError
from fxkit.ir.session import EditSession
from fxkit.ir.types import type_of
from fxkit.tracing.symbolic import symbolic_trace


def _chain(length: int) -> fx.GraphModule:
    """Return alternating relu and tanh; `%relu` is the first node after the input."""
    made = fx.Graph()
    value = made.placeholder("x")
    for _ in range(length // 2):
        value = made.call_function(torch.relu, (value,))
        value = made.call_function(torch.tanh, (value,))
    made.output(value)
    return fx.GraphModule(nn.Module(), made)


def _types(gm: fx.GraphModule) -> dict[str, Any]:
    return {node.name: type_of(node) for node in gm.graph.nodes}


def _from_scratch(gm: fx.GraphModule, *args: Any) -> dict[str, Any]:
    fresh = fx.GraphModule(gm, fx.Graph())
    output = fresh.graph.graph_copy(gm.graph, {})
    fresh.graph.output(output)
    names = [node.name for node in gm.graph.nodes]
    for node in fresh.graph.nodes:
        node.meta = {}
    propagate_types(fresh, args)
    return dict(zip(names, [type_of(node) for node in fresh.graph.nodes], strict=True))


def _node(gm: fx.GraphModule, name: str) -> fx.Node:
    return graph(gm)[name].fx_node


def test_a_change_that_keeps_the_type_stops_at_the_users() -> None:
    gm = _chain(1000)
    types = TypeAnalysis(gm, (torch.randn(2, 3),))
    assert types.visited == len(gm.graph.nodes)
    relu = _node(gm, "relu_100")
    with edit(gm) as e:
        e.replace(relu, e.call(torch.sigmoid, *relu.args, before=relu))
    assert types.update(e.journal) == types.visited == 2
    assert type_of(_node(gm, "sigmoid")).shape == (2, 3)


def test_no_change_visits_nothing() -> None:
    gm = _chain(10)
    types = TypeAnalysis(gm, (torch.randn(2, 3),))
    assert types.update([]) == 0
    assert types.update() == 0


def test_a_change_of_type_reaches_as_far_as_types_change() -> None:
    gm = symbolic_trace(lambda x: (torch.relu(x).double().cos().float() + 1, x.sin().cos()))
    args = (torch.randn(2, 3),)
    types = TypeAnalysis(gm, args)
    double = _node(gm, "double")
    with edit(gm) as e:
        e.set_target(double, "half")
    assert types.update(e.journal) == 3
    assert type_of(double).dtype == type_of(_node(gm, "cos")).dtype == torch.float16
    assert _types(gm) == _from_scratch(gm, *args)


def test_inserted_erased_and_rewired_nodes() -> None:
    gm = symbolic_trace(lambda x, y: torch.relu(x) @ y.t() + 1)
    args = (torch.randn(2, 3), torch.randn(4, 3))
    types = TypeAnalysis(gm, args)
    with edit(gm) as e:
        x, y, matmul = _node(gm, "x"), _node(gm, "y"), _node(gm, "matmul")
        e.set_args(matmul, (y, e.call(".t", x, before=matmul)))
        e.erase(_node(gm, "relu"))
    assert types.update(e.journal) == 4
    assert types.output_type.shape == (4, 2)
    assert _types(gm) == _from_scratch(gm, *args)


def test_a_node_inserted_and_erased_again_is_forgotten() -> None:
    gm = _chain(10)
    types = TypeAnalysis(gm, (torch.randn(2, 3),))
    with edit(gm) as e:
        e.erase(e.call(torch.cos, _node(gm, "relu")))
    assert types.update(e.journal) == 0


def test_without_a_journal_what_changed_is_found() -> None:
    gm = _chain(10)
    types = TypeAnalysis(gm, (torch.randn(2, 3),))
    _node(gm, "tanh_1").target = torch.sin
    assert types.update() == 1
    _node(gm, "relu_1").args = (_node(gm, "x"),)
    assert types.update() == 1


def test_what_was_taken_back_is_found() -> None:
    gm = _chain(10)
    types = TypeAnalysis(gm, (torch.randn(2, 3),))
    before = _types(gm)
    with edit(gm) as e:
        relu = _node(gm, "relu")
        e.replace(relu, e.call(".double", *relu.args, before=relu))
        types.update(e.journal)
        assert types.output_type.dtype == torch.float64
        e.undo()
        assert types.update() > 0
    assert _types(gm) == before


def test_a_failed_update_leaves_types_and_counts_on() -> None:
    gm = symbolic_trace(lambda x, y: torch.relu(x.sin()) @ y)
    types = TypeAnalysis(gm, (torch.randn(2, 3), torch.randn(3, 5)))
    before = _types(gm)
    with edit(gm) as e:
        sine = _node(gm, "sin")
        e.replace(sine, e.call(".t", *sine.args, before=sine))
        with pytest.raises(InvalidGraphError, match="operands that matmul can take"):
            types.update(e.journal)
        e.undo()
    assert types.update() <= 4
    assert _types(gm) == before


def test_a_failed_run_leaves_types_as_they_were() -> None:
    gm = symbolic_trace(lambda x, y: torch.relu(x) @ y)
    propagate_types(gm, (torch.randn(2, 3), torch.randn(3, 5)))
    before = _types(gm)
    with pytest.raises(InvalidGraphError):
        propagate_types(gm, (torch.randn(2, 4), torch.randn(3, 5)))
    assert _types(gm) == before


def test_an_adopted_graph_is_run_anew() -> None:
    gm = _chain(4)
    types = TypeAnalysis(gm, (torch.randn(2, 3),))
    with edit(gm) as e:
        e.adopt(_chain(6))
    assert types.update(e.journal) == len(gm.graph.nodes)
    assert all(type_of(node) is not None for node in gm.graph.nodes)


def test_new_parameters_have_types() -> None:
    gm = _chain(4)
    types = TypeAnalysis(gm, (torch.randn(2, 3),))
    with edit(gm) as e:
        weight = e.add_attribute("weight", nn.Parameter(torch.randn(4, 3)))
        relu = _node(gm, "relu")
        e.replace(relu, e.call(torch.nn.functional.linear, relu.args[0], weight, before=relu))
    assert types.update(e.journal) == 6
    assert types.output_type.shape == (2, 4)
    assert types.output_type.requires_grad


def _change_metadata(e: EditSession) -> None:
    relu = next(n for n in e.graph.nodes if n.name == "relu")
    e.call(".t_", relu, after=relu)


def _change_mode(e: EditSession) -> None:
    first = next(n for n in e.graph.nodes if n.op == "call_function")
    e.call(torch._C._set_grad_enabled, False, before=first)


@pytest.mark.parametrize("change", [_change_metadata, _change_mode])
def test_what_reaches_beyond_its_users_is_run_anew(change: Callable[[EditSession], None]) -> None:
    gm = _chain(6)
    x = torch.randn(2, 3, requires_grad=True) if change is _change_mode else torch.randn(2, 3)
    types = TypeAnalysis(gm, (x,))
    with edit(gm) as e:
        change(e)
    before = types.output_type
    assert types.update(e.journal) == len(gm.graph.nodes)
    assert types.output_type != before
    assert _types(gm) == _from_scratch(gm, x)


def test_a_node_moved_across_a_mode_gets_another_type() -> None:
    gm = _chain(4)
    x = torch.randn(2, 3, requires_grad=True)
    types = TypeAnalysis(gm, (x,))
    with edit(gm) as e:
        switch = e.call(torch._C._set_grad_enabled, False, before=_node(gm, "relu"))
        types.update(e.journal)
        assert not types.output_type.requires_grad
        mark = e.mark()
        e.move(switch, after=_node(gm, "tanh_1"))
        types.update(e.journal[mark:])
    assert types.output_type.requires_grad
    assert torch.is_grad_enabled()


def test_nodes_after_a_mode_are_visited_in_that_mode() -> None:
    gm = _chain(6)
    x = torch.randn(2, 3, requires_grad=True)
    with edit(gm) as e:
        e.call(torch._C._set_grad_enabled, False, before=_node(gm, "relu_1"))
    types = TypeAnalysis(gm, (x,))
    with edit(gm) as e:
        last = _node(gm, "tanh_2")
        new = e.call(torch.mul, *last.args, _node(gm, "x"), before=last)
        e.replace(last, new)
    assert types.update(e.journal) == 2
    assert not type_of(new).requires_grad


def test_every_edit_of_a_random_walk_is_followed() -> None:
    gm = _chain(40)
    x = torch.randn(2, 3)
    types = TypeAnalysis(gm, (x,))
    generator = torch.Generator().manual_seed(0)
    targets = [torch.square, torch.t, torch.sum, torch.isnan, torch.exp, torch.zeros_like]
    for _ in range(30):
        nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
        pick = nodes[int(torch.randint(len(nodes), (), generator=generator))]
        target = targets[int(torch.randint(len(targets), (), generator=generator))]
        with edit(gm) as e:
            new = e.call(target, pick, after=pick)
            e.replace_uses(pick, new)
        types.update(e.journal)
        assert _types(gm) == _from_scratch(gm, x)
