"""Differences of graphs: each known edit is told exactly, and nothing else."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxkit.ir.provenance import derive
from fxkit.view import diff
from tests.view import models


class Program(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = torch.relu(x)
        b = torch.relu(x)
        return ((a + b) * 2).sum() + y


def pair() -> tuple[fx.GraphModule, fx.GraphModule, dict[str, fx.Node]]:
    before = fx.symbolic_trace(Program())
    after = copy.deepcopy(before)
    return before, after, {node.name: node for node in after.graph.nodes}


def counts(before: fx.GraphModule, after: fx.GraphModule) -> dict[str, int]:
    return {kind: count for kind, count in diff(before, after).counts.items() if count}


@pytest.mark.parametrize("make", [models.stack, models.empty, models.hostile, models.wide])
def test_a_copy_is_no_different(make) -> None:
    gm = make()
    found = diff(gm, copy.deepcopy(gm) if make is not models.hostile else gm)
    assert not found
    assert "no difference" in str(found)
    assert len(found.matched) == len(gm.graph.nodes)


def test_merged_node_is_removed_and_its_user_rewired() -> None:
    before, after, nodes = pair()
    nodes["relu_1"].replace_all_uses_with(nodes["relu"])
    after.graph.erase_node(nodes["relu_1"])
    found = diff(before, after)
    assert found.counts == {"added": 0, "removed": 1, "replaced": 0, "rewired": 1, "changed": 0}
    assert found.of_kind("removed")[0].before == ("relu_1",)
    assert found.of_kind("rewired")[0].before == ("add",)


def test_replacement_is_known_by_its_provenance() -> None:
    before, after, nodes = pair()
    with after.graph.inserting_before(nodes["mul"]):
        new = after.graph.call_function(F.silu, (nodes["add"],))
    derive(new, [nodes["mul"]], "times_two")
    nodes["mul"].replace_all_uses_with(new)
    after.graph.erase_node(nodes["mul"])
    (change,) = diff(before, after).changes
    assert (change.kind, change.before, change.after) == ("replaced", ("mul",), ("silu",))
    assert change.by == ("times_two",)
    assert change.old == ("%mul = aten.mul(%add, 2)",)


def test_several_nodes_replaced_by_one() -> None:
    before, after, nodes = pair()
    with after.graph.inserting_before(nodes["sum_1"]):
        new = after.graph.call_function(torch.add, (nodes["relu"], nodes["relu_1"]), {"alpha": 2})
    derive(new, [nodes["add"], nodes["mul"]], "fuse")
    nodes["mul"].replace_all_uses_with(new)
    after.graph.erase_node(nodes["mul"])
    after.graph.erase_node(nodes["add"])
    (change,) = diff(before, after).changes
    assert change.before == ("add", "mul")
    assert counts(before, after) == {"replaced": 2}


def test_new_node_is_added() -> None:
    before, after, nodes = pair()
    with after.graph.inserting_after(nodes["mul"]):
        new = after.graph.call_function(torch.neg, (nodes["mul"],))
    nodes["sum_1"].args = (new,)
    assert counts(before, after) == {"added": 1, "rewired": 1}


def test_changed_constant_and_renamed_node() -> None:
    before, after, nodes = pair()
    nodes["mul"].args = (nodes["add"], 3)
    nodes["relu_1"].name = "other"
    found = diff(before, after)
    assert {c.before: c.why for c in found.changes} == {
        ("mul",): ("constants",),
        ("relu_1",): ("name",),
    }
    assert "> %" not in str(found)


def test_rewired_without_anything_added() -> None:
    before, after, nodes = pair()
    nodes["add"].args = (nodes["relu_1"], nodes["relu"])
    (change,) = diff(before, after).changes
    assert (change.kind, change.why) == ("rewired", ("operands",))


def test_other_operator_under_the_same_name_is_no_match() -> None:
    before, after, nodes = pair()
    nodes["mul"].target = torch.div
    assert counts(before, after) == {"removed": 1, "added": 1, "rewired": 1}


def test_another_order_of_renumbered_nodes_is_matched_by_structure() -> None:
    before = fx.symbolic_trace(Program())

    class Longer(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a = torch.relu(x)
            b = torch.relu(x)
            return torch.sum(torch.mul(torch.add(a, b), 2)) + y

    assert not diff(before, fx.symbolic_trace(Longer()))


def test_text_json_and_html() -> None:
    before, after, nodes = pair()
    nodes["mul"].args = (nodes["add"], 3)
    found = diff(before, after)
    assert str(found).splitlines()[0] == "9 nodes before, 9 after: 1 changed"
    values = json.loads(found.to_json())
    assert values["changes"][0]["kind"] == "changed"
    assert "aten.mul(%add, 3)" in found.html()
