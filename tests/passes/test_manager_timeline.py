"""Snapshots after each pass and each rewrite, and runs that stop early."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import fxkit
from fxkit.errors import PassError
from fxkit.ir.printer import format_graph
from fxkit.passes import pass_function
from fxkit.passes.manager.manager import PassManager

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.relu(torch.relu(self.first(x) * 1) * 1)
        return torch.tanh(torch.relu(self.second(x + 0))) * 2


@pytest.fixture
def gm():
    torch.manual_seed(0)
    return fxkit.symbolic_trace(Model())


@pass_function(numerics="changed")
def relu_to_tanh(edit, context):
    for found in fxkit.graph(edit.gm).find(torch.relu):
        node = found.fx_node
        with edit.on_behalf_of([node], "relu_to_tanh"):
            edit.replace(node, edit.call(torch.tanh, *node.args, before=node))


@pass_function
def nothing(edit, context):
    pass


def text(gm):
    return format_graph(gm)


PASSES = [fxkit.passes.Canonicalise(), nothing, relu_to_tanh, fxkit.passes.DeadCodeElimination()]


def test_each_snapshot_is_the_graph_of_a_shorter_run(gm):
    given = text(gm)
    result = PassManager(PASSES, verify="structure").run(gm)
    timeline = result.timeline
    assert [s.after for s in timeline] == [
        "", "canonicalise", "nothing", "relu_to_tanh", "dead_code_elimination",
    ]  # fmt: skip
    assert str(timeline[0]) == given
    assert str(timeline[-1]) == text(gm)
    for count in range(len(PASSES) + 1):
        torch.manual_seed(0)
        shorter = fxkit.symbolic_trace(Model())
        stopped = PassManager(PASSES, verify="structure").run(shorter, stop_after=count)
        assert str(timeline[count]) == text(shorter)
        assert len(stopped.records) == count
        assert (stopped.stopped is None) == (count == len(PASSES))
        assert torch.equal(timeline[count].graph_module(X), shorter(X))


def test_each_rewrite_has_its_snapshot(gm):
    result = PassManager(PASSES, verify="structure").run(gm)
    assert len(result.sites) == result.timeline.rewrites
    assert [site.by for site in result.sites[-2:]] == ["relu_to_tanh"] * 2
    assert result.sites[-1].at == ("relu_2",) and result.sites[-1].source
    for count in range(len(result.sites) + 1):
        torch.manual_seed(0)
        limited = fxkit.symbolic_trace(Model())
        stopped = PassManager(PASSES, verify="structure").run(limited, max_rewrites=count)
        assert str(result.timeline.after_rewrites(count)) == text(limited)
        if count < len(result.sites):
            assert stopped.stopped == f"the limit of {count} rewrites"
            assert len(stopped.sites) == count
    with pytest.raises(IndexError):
        result.timeline.after_rewrites(count + 1)


def test_a_bare_replacement_is_a_rewrite(gm):
    @pass_function(numerics="changed")
    def bare(edit, context):
        for found in fxkit.graph(edit.gm).find(torch.relu):
            node = found.fx_node
            edit.replace(node, edit.call(torch.tanh, *node.args, before=node))

    result = PassManager([bare]).run(gm)
    assert [site.at for site in result.sites] == [("relu",), ("relu_1",), ("relu_2",)]
    counts = [str(result.timeline.after_rewrites(k)).count("aten.relu") for k in range(4)]
    assert counts == [3, 2, 1, 0]


def test_the_environment_limits_rewrites(gm, monkeypatch):
    monkeypatch.setenv("FXKIT_MAX_REWRITES", "2")
    result = PassManager(PASSES, verify="structure").run(gm)
    assert len(result.sites) == 2 and result.stopped == "the limit of 2 rewrites"
    assert result.table().endswith("stopped: the limit of 2 rewrites")


def test_snapshots_keep_types_sources_and_names(gm):
    result = PassManager(PASSES, args=(X,)).run(gm)
    first = result.timeline[1].graph_module
    assert format_graph(first, sources=True).count("f32[3,4]") == 8
    assert format_graph(first, sources=True).count("test_manager_timeline.py") == 7
    assert [n.name for n in result.timeline[-1].graph_module.graph.nodes] == [
        n.name for n in gm.graph.nodes
    ]


def test_a_failed_pass_leaves_no_trace_in_the_timeline_of_the_next_run(gm):
    @pass_function
    def breaks(edit, context):
        relu_to_tanh.apply(edit, context)
        raise ValueError

    with pytest.raises(PassError):
        PassManager([breaks]).run(gm)
    result = PassManager([nothing, relu_to_tanh]).run(gm)
    assert str(result.timeline[1]).count("aten.relu") == 3


def test_a_pass_may_take_back_what_it_did(gm):
    @pass_function(numerics="changed", is_idempotent=False)
    def tries(edit, context):
        mark = edit.mark()
        relu_to_tanh.apply(edit, context)
        edit.undo(mark)
        node = fxkit.graph(edit.gm).find(torch.relu)[-1].fx_node
        with edit.on_behalf_of([node], "tries"):
            edit.replace(node, edit.call(torch.sin, *node.args, before=node))

    result = PassManager([tries]).run(gm)
    assert [site.by for site in result.sites] == ["tries"]
    assert str(result.timeline[0]).count("aten.relu") == 3
    assert str(result.timeline[1]) == text(gm)


def test_a_function_for_torch_fx_is_in_the_timeline(gm):
    def tanh_for_relu(module):
        for node in module.graph.nodes:
            if node.target is torch.relu:
                node.target = torch.tanh

    result = PassManager([nothing, tanh_for_relu, fxkit.passes.DeadCodeElimination()]).run(gm)
    assert str(result.timeline[1]).count("aten.relu") == 3
    assert str(result.timeline[2]).count("aten.relu") == 0
    assert str(result.timeline[3]) == text(gm)


@pytest.mark.parametrize("seed", range(12))
def test_random_edits_are_rebuilt_exactly(seed):
    """Inserting, erasing, rewiring, moving and renaming at random, in several passes."""
    choose = random.Random(seed)

    @pass_function(is_idempotent=False, numerics="changed")
    def scramble(edit, context):
        for _ in range(choose.randrange(1, 12)):
            body = [n for n in edit.graph.nodes if n.op.startswith("call")]
            node = choose.choice(body)
            kind = choose.randrange(5)
            if kind == 0:
                edit.call(torch.sin, node, after=node)
            elif kind == 1:
                with edit.on_behalf_of([node], "swap"):
                    edit.replace(node, edit.call(torch.cos, *node.args[:1], before=node))
            elif kind == 2 and not node.users:
                edit.erase(node)
            elif kind == 3:
                edit.rename(node, choose.choice(["add", "x", "fresh", "add_7"]))
            elif kind == 4 and node.next.op != "output" and node not in node.next.all_input_nodes:
                edit.move(node, after=node.next)

    gm = fxkit.symbolic_trace(lambda x: torch.relu(x + 1) * torch.tanh(x - 2) / (x + 3))
    states = [text(gm)]
    manager = PassManager([scramble], verify="structure")
    result = None
    for _ in range(5):
        result = manager.run(gm)
        assert str(result.timeline[0]) == states[-1]
        states.append(text(gm))
        assert str(result.timeline[1]) == states[-1]
        result.timeline[1].graph_module.graph.lint()
    choose.seed(seed)
    torch.manual_seed(0)
    again = fxkit.symbolic_trace(lambda x: torch.relu(x + 1) * torch.tanh(x - 2) / (x + 3))
    whole = PassManager([scramble] * 5, verify="structure").run(again)
    assert [str(snapshot) for snapshot in whole.timeline] == states
