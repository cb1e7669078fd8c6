"""What a run of passes did: states laid over each other, each step with its rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxkit.passes.manager.manager import PassManager
from fxkit.passes.pipelines import INFERENCE
from fxkit.tracing.capture_modes import capture
from fxkit.view import diff
from fxkit.view.differences.graph_states import TimelineView, comparison
from fxkit.view.differences.pass_timeline import timeline
from fxkit.view.drawings.graph_data import column
from tests.view.browser import drive, needs_chromium


class Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x * 1)))
        return torch.relu(y) + torch.relu(y)


@pytest.fixture(scope="module")
def shown() -> TimelineView:
    args = (torch.randn(1, 3, 6, 6),)
    gm = capture(Program().eval(), args).graph_module
    with torch.no_grad():
        return timeline(PassManager(INFERENCE, args=args).run(gm))


def living(data: Mapping[str, Any], step: int) -> set[str]:
    names, born, died = (column(data, name) for name in ("name", "born", "died"))
    spans = zip(names, born, died, strict=True)
    return {n for n, b, d in spans if b <= step and (d is None or step < d)}


def edges(data: Mapping[str, Any], step: int) -> set[tuple[str, str]]:
    names, now = column(data, "name"), living(data, step)
    found = set()
    for i, ops in enumerate(data["operands"]):
        spans = data["operand_lives"].get(i)
        for k, operand in enumerate(ops):
            is_there = spans is None or any(
                start <= step and (end is None or step < end) for start, end in spans[k]
            )
            if is_there and {names[operand], names[i]} <= now:
                found.add((names[operand], names[i]))
    return found


def test_each_step_says_what_fired(shown: TimelineView) -> None:
    titles = [step.title for step in shown.steps]
    assert titles[0] == "input"
    assert {"canonicalise", "fold_batch_norm", "dead_code_elimination"} <= set(titles)
    rules = dict(shown.steps[titles.index("canonicalise")].rules)
    assert rules["multiply_by_one"] == 1
    assert "multiply_by_one × 1" in str(shown)


def test_each_state_is_the_graph_of_that_time(shown: TimelineView) -> None:
    data = shown.to_dict()
    assert len(data["steps"]) == len(shown.steps)
    for i, step in enumerate(shown.steps):
        nodes = [n for n in step.graph_module.graph.nodes if n.op != "get_attr"]
        assert living(data, i) == {node.name for node in nodes}
        wanted = {(o.name, n.name) for n in nodes for o in n.all_input_nodes if o.op != "get_attr"}
        assert edges(data, i) == wanted
        assert data["steps"][i]["nodes"] == len(step.graph_module.graph.nodes)


def test_operands_come_before_their_users(shown: TimelineView) -> None:
    assert all(o < i for i, ops in enumerate(shown.to_dict()["operands"]) for o in ops)


def test_two_graphs_are_two_states(shown: TimelineView) -> None:
    first, last = shown.steps[0].graph_module, shown.steps[-1].graph_module
    data = comparison(diff(first, last)).to_dict()
    assert living(data, 0) == {n.name for n in first.graph.nodes if n.op != "get_attr"}
    assert living(data, 1) == {n.name for n in last.graph.nodes if n.op != "get_attr"}
    assert data["steps"][1]["added"] + data["steps"][1]["removed"] > 3


SLIDE = """
const root = document.querySelector(".fx-viewer"), view = root.fxViewer, out = [];
const slider = root.querySelector("input[type=range]");
const place = (b) => [b.title + b.node, [b.x, b.y]];
const places = () => Object.fromEntries(view.scene().boxes.map(place));
const start = JSON.stringify(places());
for (let i = 0; i <= Number(slider.max); i++) {
  slider.value = i;
  slider.dispatchEvent(new Event("input"));
  out.push(root.querySelector(".fx-step").textContent);
}
return { out, kept: start === JSON.stringify(places()), max: Number(slider.max) };
"""


@needs_chromium
def test_the_slider_tells_each_step_and_nothing_moves(shown: TimelineView, tmp_path: Path) -> None:
    found = drive(shown.html(), SLIDE, tmp_path)
    assert found["max"] == len(shown.steps) - 1
    assert found["kept"]
    for step, words in zip(shown.steps, found["out"], strict=True):
        assert step.title in words
        assert all(f"{rule} × {count}" in words for rule, count in step.rules.items())


def test_the_page_is_saved(shown: TimelineView, tmp_path: Path) -> None:
    path = shown.save(tmp_path / "passes.html")
    assert "fx-steps" in path.read_text()
