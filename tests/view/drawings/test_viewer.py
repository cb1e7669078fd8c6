"""The viewer of a graph, driven in headless Chromium: search, open, colour, select, picture."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn

import fxkit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.view import draw
from fxkit.view.pages.page import fragment_page
from fxkit.view.texts.theme import FAMILY_COLOURS, LIGHT
from tests.view import models
from tests.view.browser import drive, needs_chromium, picture

pytestmark = needs_chromium

SCRIPT = """
const root = document.querySelector(".fx-viewer"), view = root.fxViewer, out = {};
const key = (name, options) => root.dispatchEvent(
  new KeyboardEvent("keydown", { key: name, bubbles: true, ...options }));
const pointer = (kind, at, options) => root.querySelector("canvas").dispatchEvent(
  new PointerEvent(kind,
    { clientX: at.x, clientY: at.y, pointerId: 1, bubbles: true, ...options }));
const click = (name, options) => {
  const at = view.at(name);
  pointer("pointerdown", at, options);
  pointer("pointerup", at, options);
};
root.querySelector("canvas").setPointerCapture = () => {};
out.start = view.state();

const input = root.querySelector("input[type=search]");
input.value = "soft.ax|gelu";
input.dispatchEvent(new Event("input"));
out.searched = [view.state().hits, root.querySelector("output").textContent];
input.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
out.stepped = [view.state().selected, root.querySelector("output").textContent];
input.value = "(";
input.dispatchEvent(new Event("input"));
out.broken = root.querySelector("output").textContent;
key("Escape");

key("E");
out.closed = view.state();
view.select("softmax_2");
out.revealed = view.state();
out.panel = root.querySelector(".fx-panel").textContent;
view.unfold("layers.0");
out.unfolded = view.state();
key("e");
out.opened = view.state();

const chooser = root.querySelector("select");
out.colours = [...chooser.options].map((option) => option.value);
chooser.value = "flops";
chooser.dispatchEvent(new Event("change"));
out.coloured = [view.state().colour, root.querySelector(".fx-legend").textContent];

view.select("mask");
pointer("pointermove", view.at("mask"));
out.hovered = root.querySelector(".fx-info").textContent;
click("mask");
out.clicked = view.state();
view.select("add");
click("softmax", { shiftKey: true });
out.path = view.state();
view.fit();
const before = view.state().camera;
key("+"); key("ArrowRight");
out.moved = [before, view.state().camera];
root.querySelector("[data-do=theme]").click();
out.theme = document.documentElement.dataset.theme;
key("?");
out.help = root.querySelector(".fx-help").textContent;
return out;
"""


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Any:
    gm = models.stack(3)
    propagate_types(gm, models.stack_args())
    return drive(draw(gm).html(), SCRIPT, tmp_path_factory.mktemp("viewer"))


def test_like_layers_are_drawn_once_at_first(driven: Any) -> None:
    assert driven["start"]["frames"] == ["layers.0 … layers.2 × 3"]
    assert driven["start"]["boxes"] == len(draw(models.stack(3)).scene.boxes)


def test_search_takes_a_regular_expression(driven: Any) -> None:
    hits, words = driven["searched"]
    assert sorted(hits) == ["gelu", "gelu_1", "gelu_2", "softmax", "softmax_1", "softmax_2"]
    assert words == "6 found"
    assert driven["stepped"] == ["softmax", "1 of 6"]
    assert driven["broken"] == "not a pattern"


def test_modules_close_and_open(driven: Any) -> None:
    assert driven["closed"]["frames"] == []
    assert driven["revealed"]["frames"] == ["layers.0 … layers.2 × 3"]
    assert driven["unfolded"]["frames"] == ["layers.0", "layers.1", "layers.2"]
    assert driven["opened"]["boxes"] == len(draw(models.stack(3), depth=None).scene.boxes)


def test_selection_tells_all_and_finds_the_node(driven: Any) -> None:
    assert driven["revealed"]["selected"] == "softmax_2"
    assert driven["revealed"]["code"] == 'fxkit.graph(gm)["softmax_2"]'
    for words in ("aten.softmax", "f32[2,3,3]", "(9, 3, 1)", "layers.2", "add_6", "matmul_5"):
        assert words in driven["panel"]
    assert driven["clicked"]["selected"] == "mask"


def test_colours_are_those_that_are_known(driven: Any) -> None:
    assert driven["colours"] == ["family", "flops", "bytes", "dtype", "effect"]
    colour, legend = driven["coloured"]
    assert colour == "flops"
    assert "FLOP" in legend


def test_hover_says_what_a_box_is(driven: Any) -> None:
    assert driven["hovered"].startswith("mask  ·  input  ·  f32[3,3]  ·  stride (3, 1)  ·  3 users")


def test_a_path_is_selected(driven: Any) -> None:
    assert driven["path"]["path"] == ["add", "softmax"]
    assert driven["path"]["code"] == (
        'g = fxkit.graph(gm); g.between(g["add"], g["softmax"])'
    )  # fmt: skip


def test_keys_move_the_picture_and_theme_and_help_work(driven: Any) -> None:
    before, after = driven["moved"]
    assert after["s"] > before["s"]
    assert after["x"] > before["x"]
    assert driven["theme"] == "dark"
    assert "search by regular expression" in driven["help"]


def test_the_code_that_is_copied_finds_the_node(driven: Any) -> None:
    gm = models.stack(3)
    found = eval(driven["revealed"]["code"], {"fxkit": fxkit, "gm": gm})
    assert found.name == "softmax_2"


def test_the_picture_has_the_boxes_and_their_colours(tmp_path: Path) -> None:
    page = draw(models.stack(2), depth=None).html()
    light = picture(page, "theme=light", tmp_path, size=(640, 480))
    shown = light.colours()
    assert {FAMILY_COLOURS[f][0] for f in ("contraction", "reduction", "pointwise")} <= shown
    assert FAMILY_COLOURS["contraction"][1] in shown
    assert LIGHT["page"] in shown
    dark = picture(page, "theme=dark", tmp_path, size=(640, 480)).colours()
    assert FAMILY_COLOURS["contraction"][2] in dark
    assert FAMILY_COLOURS["contraction"][0] not in dark


OVERLAPS = """
return [...document.querySelectorAll(".fx-viewer")].map((root) => {
  const view = root.fxViewer, found = [];
  const look = (name) => {
    const s = view.scene(), things = [...s.boxes, ...s.tags].sort((a, b) => a.y - b.y);
    let overlaps = 0, outside = 0;
    things.forEach((a, i) => {
      if (a.x < 0 || a.y < 0 || a.x + a.w > s.width || a.y + a.h > s.height) outside++;
      for (let k = i + 1; k < things.length && things[k].y < a.y + a.h - 0.01; k++) {
        if (things[k].x < a.x + a.w - 0.01 && things[k].x + things[k].w > a.x + 0.01) overlaps++;
      }
    });
    const ends = s.lines.filter((line) => line.to).filter((line) => {
      const x = line.points[line.points.length - 2], y = line.points[line.points.length - 1];
      return Math.abs(y - line.to.y) > 0.01 || x < line.to.x || x > line.to.x + line.to.w;
    }).length;
    found.push([name, overlaps, outside, ends, s.boxes.length]);
  };
  look("start"); view.openAll(true); look("open"); view.openAll(false); look("closed");
  return found;
});
"""


def test_nothing_overlaps_however_modules_are_opened(tmp_path: Path) -> None:
    graphs = [
        models.stack(),
        fx.symbolic_trace(models.Shared()),
        fx.symbolic_trace(models.Unequal()),
        models.wide(),
        models.random_graph(150),
        models.random_graph(80, seed=3, reach=80),
        models.hostile(),
        models.empty(),
    ]
    page = fragment_page("all", "".join(draw(gm).html_fragment() for gm in graphs))
    for gm, looks in zip(graphs, drive(page, OVERLAPS, tmp_path), strict=True):
        assert [look[:4] for look in looks] == [[n, 0, 0, 0] for n in ("start", "open", "closed")]
        assert looks[2][4] == len(draw(gm, depth=0).scene.boxes)


def test_a_graph_of_ten_thousand_arguments_is_shown(tmp_path: Path) -> None:
    found = drive(
        draw(models.wide(10_000)).html(),
        'const view = document.querySelector(".fx-viewer").fxViewer;'
        "const start = view.state().boxes; view.unfold('part 1'); view.search('sin');"
        "const unfolded = view.state().boxes; view.openAll(true);"
        "return [start, unfolded, view.state().boxes, view.state().hits.length];",
        tmp_path,
    )
    assert found == [4, 103, 10_003, 10_000]


LEVELS = """
const root = document.querySelector(".fx-viewer"), view = root.fxViewer;
const canvas = document.querySelector("canvas"), out = { levels: [] };
const fits = () => Math.min(
  canvas.clientWidth / view.scene().width, canvas.clientHeight / view.scene().height) > 0.45;
const now = () => [view.state().levels, view.state().boxes];
const key = (name) => root.dispatchEvent(
  new KeyboardEvent("keydown", { key: name, bubbles: true }));
out.start = [...now(), fits()];
for (const level of [1, 2, 3, 99]) { view.openLevels(level); out.levels.push(now()); }
key("D"); out.closed = view.state().levels;
key("d"); out.opened = view.state().levels;
view.select("softmax_2");
const before = view.state().camera, r = canvas.getBoundingClientRect();
canvas.setPointerCapture = () => {};
canvas.dispatchEvent(new PointerEvent("pointerdown",
  { clientX: r.right - 30, clientY: r.bottom - 18, pointerId: 1, bubbles: true }));
out.moved = view.state().camera.y - before.y;
return out;
"""


def test_a_page_opens_on_as_many_levels_as_can_be_read(tmp_path: Path) -> None:
    class Stages(nn.Module):
        """Three unlike stages of like blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(
                nn.ModuleList(models.Block(8) for _ in range(blocks)) for blocks in (2, 3, 4)
            )

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for number, stage in enumerate(self.stages):
                for block in cast(nn.ModuleList, stage):
                    x = block(x, mask)
                x = x * (number + 2)
            return x

    gm = fxkit.capture(Stages(), (torch.randn(2, 3, 8), torch.zeros(3, 3))).graph_module
    found = drive(draw(gm, max_nodes=10_000).html(), LEVELS, tmp_path)
    levels, boxes, is_readable = found["start"]
    assert is_readable
    counts = [count for _, count in found["levels"]]
    assert [level for level, _ in found["levels"]][:3] == [1, 2, 3]
    assert counts == sorted(counts) and counts[0] < counts[1]
    assert boxes == dict(map(tuple, found["levels"]))[levels] < counts[-1]
    assert found["opened"] == found["closed"] + 1
    assert found["moved"] > 0, "a click on the map goes there"


def test_an_address_that_searches_goes_to_the_first_find(tmp_path: Path) -> None:
    page = draw(models.stack(4), depth=None).html()
    script = "return document.querySelector('.fx-viewer').fxViewer.state().selected;"
    assert drive(page, script, tmp_path, fragment="search=softmax") == "softmax"
    assert drive(page, script, tmp_path) == ""


class Convolutions(nn.Module):
    """Layers in layers, of which batch norms fold into each first one."""

    def __init__(self, depth: int = 24) -> None:
        super().__init__()
        pairs = [
            nn.Sequential(
                nn.Conv2d(4, 4, 3, stride=1, padding=2, dilation=2), nn.BatchNorm2d(4), nn.ReLU()
            )
            for _ in range(depth)
        ]
        self.stages = nn.ModuleList(nn.Sequential(*pairs[i : i + 4]) for i in range(0, depth, 4))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = torch.sin(stage(x))
        return x


def test_a_comparison_opens_on_its_first_changes_on_both_sides(tmp_path: Path) -> None:
    gm = fxkit.capture(Convolutions().eval(), (torch.ones(1, 4, 8, 8),)).graph_module
    before = copy.deepcopy(gm)
    fxkit.PassManager([fxkit.passes.FoldBatchNorm()]).run(gm)
    script = """
    const root = document.querySelector(".fx-viewer"), view = root.fxViewer;
    const { camera } = view.state(), canvas = root.querySelector("canvas");
    const { width } = canvas.getBoundingClientRect();
    const boxes = view.scene().boxes.filter((box) => box.title === "conv2d");
    return boxes.sort((a, b) => a.y - b.y).slice(0, 2).map(
      (box) => box.x > camera.x && box.x + box.w < camera.x + width / 2 / camera.s);
    """
    assert drive(fxkit.diff(before, gm).html(), script, tmp_path) == [True, True]
