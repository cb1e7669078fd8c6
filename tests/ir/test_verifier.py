"""The verifier finds each fault, and none in a sound graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.errors import InvalidGraphError
from fxkit.ir.verifier import verify
from fxkit.tracing.symbolic import symbolic_trace


def _traced() -> fx.GraphModule:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return symbolic_trace(lambda x: torch.exp(model[1](model[0](x)) + 1))


class _Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.layer(x) * self.scale).relu() + y


def _nodes(gm: fx.GraphModule) -> dict[str, fx.Node]:
    return {node.name: node for node in gm.graph.nodes}


def _set(node: fx.Node, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(node, name, value)


def _foreign(gm: fx.GraphModule) -> None:
    other = fx.Graph()
    stranger = other.placeholder("stranger")
    node = _nodes(gm)["exp"]
    node.args = (stranger,)


def _drop_output(gm: fx.GraphModule) -> None:
    gm.graph.erase_node(_nodes(gm)["output"])


def _second_output(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(_nodes(gm)["exp"]):
        gm.graph.create_node("output", "output", (None,))


def _late_placeholder(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(_nodes(gm)["exp"]):
        gm.graph.create_node("placeholder", "late")


def _drop_attribute(name: str) -> Callable[[fx.GraphModule], None]:
    return lambda gm: delattr(gm, name)


def _lose_user(gm: fx.GraphModule) -> None:
    nodes = _nodes(gm)
    del nodes["layer"].users[nodes["mul"]]


def _invent_user(gm: fx.GraphModule) -> None:
    nodes = _nodes(gm)
    nodes["layer"].users[nodes["add"]] = None


def _module_becomes_number(gm: fx.GraphModule) -> None:
    del gm.layer
    gm.__dict__["layer"] = 3


_FAULTS: dict[str, tuple[Callable[[fx.GraphModule], Any], str]] = {
    "operand later": (lambda gm: _nodes(gm)["layer"].prepend(_nodes(gm)["exp"]), "defined before"),
    "operand of another graph": (_foreign, "%stranger to be defined before"),
    "no output": (_drop_output, "one output, at the end, got 0"),
    "two outputs": (_second_output, "one output, at the end, got 2"),
    "placeholder late": (_late_placeholder, "placeholders first"),
    "name twice": (lambda gm: _set(_nodes(gm)["exp"], name="layer"), "'layer' twice"),
    "no such attribute": (_drop_attribute("scale"), "to have 'scale'"),
    "no such module": (_drop_attribute("layer"), "to have 'layer'"),
    "no module": (_module_becomes_number, "a module at 'layer', got int"),
    "no function": (lambda gm: _set(_nodes(gm)["exp"], target="exp"), "a function to call"),
    "no method": (lambda gm: _set(_nodes(gm)["relu"], target=torch.relu), "the name of a method"),
    "operands of an operator": (
        lambda gm: _set(_nodes(gm)["mul"], args=_nodes(gm)["mul"].args[:1]),
        "expected 2 operands of operator.mul, got 1",
    ),
    "user lost": (_lose_user, "to be a user of %layer, got none"),
    "user invented": (_invent_user, "expected %add to use it"),
    "unknown kind": (lambda gm: _set(_nodes(gm)["exp"], op="call_ghost"), "got 'call_ghost'"),
}


@pytest.mark.parametrize("name", sorted(_FAULTS))
def test_fault_is_found(name: str) -> None:
    damage, message = _FAULTS[name]
    gm = symbolic_trace(_Owner())
    verify(gm)
    damage(gm)
    with pytest.raises(InvalidGraphError) as caught:
        verify(gm)
    assert message in str(caught.value)
    assert caught.value.hint


_SEEN_ONLY_FROM_THE_WHOLE = {"name twice", "two outputs", "no output"}


@pytest.mark.parametrize("name", sorted(_FAULTS.keys() - _SEEN_ONLY_FROM_THE_WHOLE))
def test_fault_is_found_among_the_nodes_that_are_asked_for(name: str) -> None:
    damage, message = _FAULTS[name]
    gm = symbolic_trace(_Owner())
    verify(gm, only=list(gm.graph.nodes))
    damage(gm)
    with pytest.raises(InvalidGraphError) as caught:
        verify(gm, only=list(gm.graph.nodes))
    assert message in str(caught.value)


def test_nodes_that_are_not_asked_for_are_not_looked_at() -> None:
    gm = symbolic_trace(_Owner())
    _drop_attribute("scale")(gm)
    verify(gm, only=[_nodes(gm)["exp"]])


def test_sound_graphs_pass() -> None:
    for program in (_Owner(), nn.Sequential(), lambda x: x, lambda: 3):
        verify(symbolic_trace(program))


def test_the_captured_graph_of_a_transformer_passes() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    gm = fxkit.capture(model, (torch.randn(2, 5, 8), torch.randn(2, 3, 8))).graph_module
    assert any(node.op == "call_function" for node in gm.graph.nodes)
    verify(gm)


class _Two(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x)
        return y, y + 1


def test_results_that_do_not_fit_how_calls_are_nested() -> None:
    x = torch.ones(2)
    gm = torch.export.export(_Two(), (x,)).module()
    (relu,) = (node for node in gm.graph.nodes if "relu" in node.name)
    with pytest.raises(InvalidGraphError, match="expected 2 results"), fxkit.edit(gm) as edit:
        edit.set_output((*gm.graph.output_node().all_input_nodes, relu))
    assert len(gm(x)) == 2
    with pytest.raises(InvalidGraphError, match="expected 1 inputs"), fxkit.edit(gm) as edit:
        edit.insert("placeholder", "scale", after=gm.graph.find_nodes(op="placeholder")[0])
    gm.graph.set_codegen(fx.graph.CodeGen())
    with fxkit.edit(gm) as edit:
        edit.set_output((*gm.graph.output_node().all_input_nodes, relu))
    assert len(gm(x)) == 3
