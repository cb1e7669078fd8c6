"""The module tree: what a line says, folding, depth, and graphs that are hard to show."""

from __future__ import annotations

import json

import pytest
import torch
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.view import tree
from tests.view import models


def test_lines_name_operator_type_and_parameters() -> None:
    gm = models.stack(1)
    propagate_types(gm, models.stack_args())
    lines = str(tree(gm)).splitlines()
    line = next(line for line in lines if "head" in line)
    assert line.split() == ["├─", "head:", "Linear", "aten.linear", "f32[2,3,32]", "288"]
    total = sum(p.numel() for p in models.Stack(1).parameters())
    assert lines[0].split() == ["Stack", "18", "nodes", str(total)]


def test_like_layers_are_folded_and_counted() -> None:
    found = tree(models.stack(6)).root
    folded = next(e for e in found.walk() if e.repeats > 1)
    assert folded.name == "layers.0 … layers.5 × 6"
    assert folded.repeats == 6
    assert folded.nodes == 6 * len(folded.children)
    layer = sum(p.numel() for p in models.Block(8).parameters())
    assert folded.parameters == 6 * layer
    assert found.nodes == len(models.stack(6).graph.nodes)


def test_layers_that_differ_are_not_folded() -> None:
    names = [e.name for e in tree(fx.symbolic_trace(models.Unequal())).root.children]
    assert names == ["x", "layers.0", "layers.1 … layers.2 × 2", "output"]


def test_layers_of_other_shapes_are_not_folded() -> None:
    gm = fx.symbolic_trace(models.Unequal())
    propagate_types(gm, (torch.ones(2, 4),))
    last = next(n for n in gm.graph.nodes if n.name == "layers_2_0")
    last.meta.clear()
    assert not any(e.repeats > 1 for e in tree(gm).root.walk())


def test_fold_can_be_turned_off() -> None:
    names = [e.name for e in tree(models.stack(3), fold=False).root.children]
    assert names[3:6] == ["layers.0", "layers.1", "layers.2"]


def test_a_module_called_twice_is_shown_twice() -> None:
    gm = fx.symbolic_trace(models.Shared())
    names = [e.name for e in tree(gm).root.children]
    assert names == ["x", "block", "sin", "block (call 2)", "output"]


@pytest.mark.parametrize(("depth", "lines"), [(0, 1), (1, 7), (None, 20)])
def test_depth_limits_levels(depth: int | None, lines: int) -> None:
    assert len(str(tree(models.stack(3), depth=depth)).splitlines()) == lines


def test_head_counts_what_it_leaves_out() -> None:
    found = tree(models.stack(3))
    assert found.head(4).splitlines()[-1] == "… 16 more lines"
    assert found.head(100) == str(found)


def test_json_holds_the_tree() -> None:
    found = tree(models.stack(2))
    values = json.loads(found.to_json())
    assert values["version"] == 1
    assert values["tree"]["name"] == "Stack"
    assert [c["name"] for c in values["tree"]["children"]][2] == "embedding"


def test_constants_leave_out_defaults() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.transpose(torch.softmax(x, dim=-1), dim0=0, dim1=1)[:, 1:]

    entries = {e.name: e for e in tree(fx.symbolic_trace(Model())).root.walk()}
    assert entries["softmax"].constants == "-1"
    assert entries["transpose"].constants == "0, 1"
    assert entries["getitem"].constants == "[:,1:]"


@pytest.mark.parametrize("make", [models.empty, models.wide, models.hostile])
def test_hard_graphs_have_one_line_a_node(make) -> None:
    gm = make()
    lines = str(tree(gm, fold=False)).splitlines()
    assert len(lines) >= 1 + sum(n.op != "get_attr" for n in gm.graph.nodes)
    assert all(line.isprintable() for line in lines)
