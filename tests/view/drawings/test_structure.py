"""Groups of graphs without recorded modules: by the paths of constants, what repeats, parts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxkit.tracing import capture
from fxkit.view import diff, draw, tree
from fxkit.view.drawings.hierarchy import Hierarchy, ModuleGroup
from tests.view import models


def bare(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy without any word about modules."""
    gm = copy.deepcopy(gm)
    for node in gm.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    return gm


def groups(gm: fx.GraphModule) -> list[str]:
    return [item.title for item in Hierarchy(gm).root.items if isinstance(item, ModuleGroup)]


def captured(layers: int) -> fx.GraphModule:
    with torch.no_grad():
        return capture(models.Stack(layers), models.stack_args()).graph_module


def repeated(layers: int, *, weights: bool = False) -> fx.GraphModule:
    """Return layers in a row that no module and no path of a constant tells apart."""
    graph = fx.Graph()
    x = start = graph.placeholder("x")
    inputs = [graph.placeholder(f"w_{i}") for i in range(layers if weights else 0)]
    for i in range(layers):
        y = graph.call_function(F.gelu, (x,))
        y = graph.call_function(torch.mul, (y, inputs[i] if weights else start))
        y = graph.call_function(torch.tanh, (y,))
        y = graph.call_function(torch.sin, (y,))
        x = graph.call_function(torch.add, (x, y))
    graph.output(graph.call_function(torch.maximum, (x, start)))
    return fx.GraphModule(nn.Module(), graph)


def test_the_paths_of_constants_tell_the_modules() -> None:
    gm = captured(8)
    assert groups(gm) == ["embedding", "layers.0 … layers.7 × 8", "head"]
    assert groups(bare(gm)) == groups(gm)
    assert "× 8" in str(tree(bare(gm)))


def test_what_repeats_is_folded() -> None:
    gm = repeated(12)
    assert groups(gm) == ["block 1 … block 12 × 12"]
    assert "drawn as 8 boxes" in str(draw(gm))
    everything = draw(gm, depth=None)
    assert len(everything.scene.boxes) == len(everything.hierarchy.nodes)


def test_what_differs_is_not_folded() -> None:
    gm = repeated(12)
    changed = [node for node in gm.graph.nodes if node.target is torch.tanh][5]
    changed.target = torch.sigmoid
    assert groups(gm) == ["block 1 … block 5 × 5", "block 6 … block 11 × 6"]


def test_layers_of_other_wiring_are_not_alike() -> None:
    gm = repeated(12)
    last = [node for node in gm.graph.nodes if node.target is torch.add][-1]
    last.args = (last.args[1], last.args[1])
    assert groups(gm) == ["block 1 … block 11 × 11", "block 12"]


def test_small_graphs_stay_as_they_are() -> None:
    assert groups(repeated(8)) == []


def test_many_inputs_lie_where_they_are_read() -> None:
    gm = repeated(30, weights=True)
    root = Hierarchy(gm).root
    assert groups(gm) == ["block 1 … block 30 × 30"]
    layer = next(item for item in root.items if isinstance(item, ModuleGroup))
    assert sum(leaf.label.operator == "input" for leaf in layer.leaves()) == 1
    few = Hierarchy(repeated(12, weights=True)).root
    assert (
        sum(not isinstance(i, ModuleGroup) and i.label.operator == "input" for i in few.items) == 13
    )


@pytest.mark.parametrize("nodes", [2000, pytest.param(20_000, marks=pytest.mark.sweep)])
def test_a_very_long_list_is_cut_into_parts(nodes: int) -> None:
    view = draw(models.random_graph(nodes))
    assert len(view.scene.boxes) < 160
    assert sum(1 for _ in view.hierarchy.root.leaves()) == nodes + 2
    boxes = {line.target for line in view.scene.lines if line.target}
    assert len(view.scene.lines) < 20 * len(boxes)


def test_two_states_of_a_long_graph_are_laid_over_each_other() -> None:
    before = repeated(12)
    after = copy.deepcopy(before)
    last = next(node for node in after.graph.nodes if node.target is torch.maximum)
    last.target = torch.minimum
    found = diff(before, after)
    assert "block 1" in found.html()


def test_inner_modules_of_lists_are_named_with_their_number() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
                for _ in range(20)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.relu(block(x))
            return x

    with torch.no_grad():
        gm = capture(Deep(), (torch.ones(2, 4),)).graph_module
    root = Hierarchy(bare(gm)).root
    (layer,) = [item for item in root.items if isinstance(item, ModuleGroup)]
    assert layer.title == "blocks.0 … blocks.19 × 20"
    inner = [item.path for item in layer.items if isinstance(item, ModuleGroup)]
    assert inner == ["blocks.0.0", "blocks.0.1"]
