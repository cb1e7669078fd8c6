"""The data of a graph: its schema, what it holds, and that it can stand in a page."""

from __future__ import annotations

import json
from collections.abc import Callable

import jsonschema
import pytest
import torch
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.view import draw
from fxkit.view.drawings.graph_data import as_script, column
from tests.view import models

INDEX = {"type": "array", "items": {"type": "integer", "minimum": 0}}
SCHEMA = {
    "type": "object",
    "required": ["schema", "version", "title", "nodes", "colour", "columns", "operands", "groups"],
    "properties": {
        "schema": {"const": "fxkit.graph"},
        "version": {"const": 2},
        "columns": {
            "type": "object",
            "required": ["name", "operator", "type", "family", "source", "effect"],
            "properties": {"name": {"type": "array", "items": {"type": "string"}}},
            "additionalProperties": {
                "type": "object",
                "required": ["values", "index"],
                "properties": {"values": {"type": "array", "uniqueItems": True}, "index": INDEX},
            },
        },
        "operands": {"type": "array", "items": INDEX},
        "groups": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["path", "name", "kind", "parameters", "items"],
                "properties": {
                    "items": {"type": "array", "items": {"type": "integer"}},
                    "fold": INDEX,
                    "call": {"type": "integer"},
                },
                "additionalProperties": True,
            },
        },
        "opened": INDEX,
    },
}

GRAPHS: dict[str, Callable[[], fx.GraphModule]] = {
    "stack": models.stack,
    "empty": models.empty,
    "wide": models.wide,
    "hostile": models.hostile,
    "shared": lambda: fx.symbolic_trace(models.Shared()),
    "random": lambda: models.random_graph(150),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("depth", ["auto", None])
@pytest.mark.parametrize("name", GRAPHS)
def test_data_keeps_to_the_schema(name: str, depth: int | str | None) -> None:
    gm = GRAPHS[name]()
    data = json.loads(draw(gm, depth=depth).to_json())
    jsonschema.validate(data, SCHEMA)
    count = len(data["columns"]["name"])
    assert len(data["operands"]) == count
    for stored in data["columns"].values():
        index = stored if isinstance(stored, list) else stored["index"]
        assert len(index) == count
    placed = [item for group in data["groups"] for item in group["items"] if item >= 0]
    assert sorted(placed) == list(range(count))
    below = [~item for group in data["groups"] for item in group["items"] if item < 0]
    folded = [member for group in data["groups"] for member in group.get("fold", ())]
    assert sorted(below + folded) == list(range(1, len(data["groups"])))


def test_edges_and_columns_are_those_of_the_graph() -> None:
    gm = models.stack(2)
    propagate_types(gm, models.stack_args())
    data = draw(gm).to_dict()
    names = column(data, "name")
    edges = {(names[o], names[i]) for i, ops in enumerate(data["operands"]) for o in ops}
    assert edges == {(o.name, n.name) for n in gm.graph.nodes for o in n.all_input_nodes}
    at = names.index("layers_0_up")
    assert column(data, "operator")[at] == "aten.linear"
    assert column(data, "type")[at] == "f32[2,3,16]"
    assert column(data, "stride")[at] == "(48, 16, 1)"
    assert column(data, "flops")[at] == 2 * 6 * 8 * 16
    assert column(data, "effect")[at] == "pure"


def test_parameters_that_a_node_reads_are_named() -> None:
    gm = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),)).module()
    data = draw(gm).to_dict()
    at = column(data, "operator").index("aten.linear")
    assert column(data, "reads")[at] == "weight, bias"


def test_costs_of_equal_calls_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxkit.view.profiling import costs

    counted: list[str] = []

    def count(node: fx.Node) -> object:
        counted.append(node.name)
        return original(node)

    original = costs.cost_of
    monkeypatch.setattr(costs, "cost_of", count)
    gm = models.stack(6)
    propagate_types(gm, models.stack_args())
    found = costs.costs_of(gm.graph.nodes)
    assert found == [original(node) for node in gm.graph.nodes]
    assert len(counted) < len(costs.costs_of(models.stack(2).graph.nodes))


def test_columns_of_what_was_measured() -> None:
    gm = models.stack(1)
    view = draw(gm, errors={"gelu": 1e-7}, color_by={"softmax": 3.0})
    data = view.to_dict()
    at = column(data, "name").index
    assert data["colour"] == "value"
    assert column(data, "error")[at("gelu")] == 1e-7
    assert column(data, "value")[at("softmax")] == 3.0
    assert column(data, "value")[at("gelu")] is None


def test_data_can_not_leave_its_element() -> None:
    data = {"x": "</script><!-- & \u2028 \ud800"}
    text = as_script(data)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text)["x"].startswith("</script><!-- & \u2028")


def test_a_page_of_twenty_thousand_nodes_stays_small() -> None:
    page = draw(models.random_graph(20_000)).html()
    assert len(page.encode()) < 3_000_000
