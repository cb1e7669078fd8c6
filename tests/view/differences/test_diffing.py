"""Differences of graphs: each known edit is told exactly, and nothing else."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import fxkit
from fxkit.analysis.editing import edit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import RewriteError
from fxkit.ir.journal import GraphChange as Edit
from fxkit.ir.printer import format_node
from fxkit.ir.provenance import derive
from fxkit.ir.session import EditSession
from fxkit.passes import PASSES
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.pipelines import INFERENCE
from fxkit.tracing.capture_modes import capture
from fxkit.view import diff
from fxkit.view.differences.graph_states import comparison
from fxkit.view.differences.matching import survivors
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


def test_another_type_of_one_of_several_values_is_told() -> None:
    def make(dtype: torch.dtype) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.chunk, (x, 2)))
        gm = fx.GraphModule({}, graph)
        propagate_types(gm, (torch.ones(4, dtype=dtype),))
        return gm

    before, after = make(torch.float32), make(torch.bfloat16)
    found = diff(before, after)
    assert [(c.after, c.why) for c in found.changes] == [
        (("chunk",), ("type",)),
        (("x",), ("type",)),
    ]
    assert printed(found.apply(before)) == printed(after)


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


def printed(gm: fx.GraphModule) -> list[str]:
    return [format_node(node) for node in gm.graph.nodes]


def agree(before: fx.GraphModule, after: fx.GraphModule, journal: Sequence[Edit]) -> None:
    """Check that a difference and a journal tell the same, and that applying it gives `after`."""
    found = diff(before, after, journal=journal)
    assert printed(found.apply(copy.deepcopy(before))) == printed(after)
    kept = survivors(journal, [node.name for node in before.graph.nodes])
    assert kept is not None
    assert dict(found.matched) == kept
    gone = {name for change in found.changes if len(change.before) for name in change.before}
    come = {name for change in found.changes for name in change.after}
    assert {n.name for n in before.graph.nodes} - kept.keys() <= gone
    assert {n.name for n in after.graph.nodes} - set(kept.values()) <= come
    edited = {change.node.name for change in journal if change.kind == "rewire"}
    renamed = {new for old, new in kept.items() if old != new}
    told = {c.after[0] for c in found.changes if c.kind in ("rewired", "changed")}
    retyped = {c.after[0] for c in found.changes if c.why == ("type",)}
    assert told | set(found.rerouted) <= edited | renamed | retyped


@given(st.integers(0, 10_000), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_a_difference_applied_to_the_graph_before_gives_the_graph_after(
    seed: int, edits: int
) -> None:
    before = models.random_graph(20, seed=seed)
    after = copy.deepcopy(before)
    generator = random.Random(seed)
    with edit(after, by="chance") as session:
        for _ in range(edits):
            chance(session, generator)
    agree(before, after, session.journal)
    without = diff(before, after)
    assert printed(without.apply(before)) == printed(after)


def chance(session: EditSession, generator: random.Random) -> None:
    """Make one edit of any kind."""
    calls = [node for node in session.graph.nodes if node.op == "call_function"]
    if not calls:
        return
    node = generator.choice(calls)
    kind = generator.choice(["insert", "replace", "swap", "merge", "constant", "rename", "erase"])
    if kind == "insert":
        new = session.call(torch.neg, node, after=node)
        session.replace_uses(node, new)
    elif kind == "replace":
        with session.on_behalf_of([node], "squares"):
            new = session.call(torch.mul, node.args[0], node.args[0], before=node)
        session.replace(node, new)
    elif kind == "swap":
        session.set_args(node, tuple(reversed(node.args)))
    elif kind == "merge":
        session.set_args(node, (node.args[0],) * len(node.args))
    elif kind == "constant":
        session.set_args(node, (*node.args[:1], generator.randrange(5))[: len(node.args)])
    elif kind == "rename":
        session.rename(node, f"other_{generator.randrange(1000)}")
    elif not node.users:
        session.erase(node)


def test_the_difference_of_each_pass_is_what_its_journal_says() -> None:
    gm = capture(models.Stack(2).eval(), models.stack_args()).graph_module
    for pass_ in INFERENCE:
        before = copy.deepcopy(gm)
        result = PassManager([pass_], args=models.stack_args()).run(gm)
        journal = [change for record in result.records for change in record.changes]
        agree(before, gm, journal)
        snapshots = result.timeline
        for i, record in enumerate(result.records):
            first, second = snapshots[i].graph_module, snapshots[i + 1].graph_module
            assert printed(diff(first, second, journal=record.changes).apply(first)) == printed(
                second
            )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(name for name, _ in PASSES.items()))
def test_the_difference_of_any_library_pass_is_what_its_journal_says(name: str) -> None:
    gm = capture(models.Stack(2).eval(), models.stack_args()).graph_module
    before = copy.deepcopy(gm)
    result = PassManager([PASSES[name]()], args=models.stack_args()).run(gm)
    agree(before, gm, [change for record in result.records for change in record.changes])


def test_operands_that_are_read_twice_are_told_apart() -> None:
    def graph(*order: int) -> fx.GraphModule:
        made = fx.Graph()
        inputs = [made.placeholder("a"), made.placeholder("b")]
        made.output(made.call_function(torch.addcmul, tuple(inputs[i] for i in order)))
        return fx.GraphModule(torch.nn.Module(), made)

    assert not diff(graph(0, 1, 0), graph(0, 1, 0))
    assert counts(graph(0, 1, 0), graph(0, 1, 1)) == {"rewired": 1}


def test_renamed_nodes_and_inputs_are_found_by_what_they_compute() -> None:
    def graph(prefix: str) -> fx.GraphModule:
        made = fx.Graph()
        x = made.create_node("placeholder", f"{prefix}_in", name=f"{prefix}_in")
        for i in range(5):
            x = made.create_node("call_function", torch.sin, (x,), name=f"{prefix}_{i}")
        made.output(x)
        return fx.GraphModule(torch.nn.Module(), made)

    found = diff(graph("a"), graph("b"))
    assert found.matched == {
        **{f"a_{i}": f"b_{i}" for i in range(5)},
        "a_in": "b_in",
        "output": "output",
    }
    assert {change.why for change in found.changes} == {("name",)}


def test_what_became_of_the_cost_is_told() -> None:
    gm = models.stack(1)
    propagate_types(gm, models.stack_args())
    smaller = copy.deepcopy(gm)
    nodes = {node.name: node for node in smaller.graph.nodes}
    nodes["gelu"].replace_all_uses_with(nodes["layers_0_up"])
    smaller.graph.erase_node(nodes["gelu"])
    found = diff(gm, smaller)
    before, after = found.cost_before.flops, found.cost_after.flops
    assert before is not None
    assert after == before - 96
    assert "FLOP → " in found.summary()


def test_another_graph_is_refused() -> None:
    found = diff(models.stack(2), models.stack(1))
    with pytest.raises(RewriteError, match="expected the graph that the difference begins at"):
        found.apply(models.empty())


def test_what_computes_comes_before_inputs_and_parameters() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, has_bias: bool) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4, bias=has_bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    before, after = (
        fxkit.capture(Layer(has_bias), (torch.ones(2, 4),)).graph_module
        for has_bias in (True, False)
    )
    found = diff(before, after)
    assert [c.before for c in found.changes] == [("linear",), ("linear_bias",)]
    table = found.html_fragment()
    assert table.index("aten.linear") < table.index("<b>removed</b>")
    assert printed(found.apply(before)) == printed(after)


def test_page_and_summary_count_the_same_changes() -> None:
    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.norm = torch.nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)) * 1

    gm = fxkit.capture(Small().eval(), (torch.ones(1, 3, 8, 8),)).graph_module
    before = copy.deepcopy(gm)
    PassManager(INFERENCE).run(gm)
    found = diff(before, gm)
    assert found.counts["replaced"]
    step = comparison(found).to_dict()["steps"][1]
    for kind in ("added", "removed", "replaced"):
        assert step[kind] == found.counts[kind]
