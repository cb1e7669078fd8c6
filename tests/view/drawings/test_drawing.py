"""Drawings: nothing overlaps, nothing is lost, every label is escaped, every format is valid."""

from __future__ import annotations

import itertools
import json
import webbrowser
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import UnsupportedError
from fxkit.view import GraphView, Report, diff, draw, tree
from fxkit.view.drawings import dot as dot_module
from tests.view import models

SVG = "{http://www.w3.org/2000/svg}"

GRAPHS: dict[str, Callable[[], fx.GraphModule]] = {
    "stack": models.stack,
    "empty": models.empty,
    "wide": models.wide,
    "hostile": models.hostile,
    "shared": lambda: fx.symbolic_trace(models.Shared()),
    "unequal": lambda: fx.symbolic_trace(models.Unequal()),
    "late exit": lambda: fx.symbolic_trace(models.LateExit()),
    "random": lambda: models.random_graph(150),
    "long edges": lambda: models.random_graph(80, seed=3, reach=80),
}
EVERY = pytest.mark.parametrize("name", GRAPHS)
DEPTHS = pytest.mark.parametrize("depth", ["auto", 0, 1, None])


def rectangles(view: GraphView) -> list[tuple[float, float, float, float]]:
    things = [*view.scene.boxes, *view.scene.tags]
    return [(b.x, b.y, b.x + b.width, b.y + b.height) for b in things]


@pytest.mark.one_in(2)
@EVERY
@DEPTHS
def test_boxes_do_not_overlap(name: str, depth: int | str | None) -> None:
    view = draw(GRAPHS[name](), depth=depth)
    ordered = sorted(rectangles(view), key=lambda r: r[1])
    for i, (left, _, right, bottom) in enumerate(ordered):
        for other in itertools.takewhile(lambda o, b=bottom: o[1] < b, ordered[i + 1 :]):
            assert other[0] >= right or other[2] <= left


@pytest.mark.one_in(2)
@EVERY
@DEPTHS
def test_everything_lies_inside(name: str, depth: int | str | None) -> None:
    scene = draw(GRAPHS[name](), depth=depth).scene
    for thing in [*scene.boxes, *scene.frames, *scene.tags]:
        assert thing.x >= 0
        assert thing.x + thing.width <= scene.width
        assert thing.y >= 0
        assert thing.y + thing.height <= scene.height
        if getattr(thing, "frame", -1) >= 0:
            around = scene.frames[thing.frame]  # pyright: ignore[reportAttributeAccessIssue]
            assert around.x < thing.x
            assert around.x + around.width > thing.x + thing.width
            assert around.y < thing.y
            assert around.y + around.height > thing.y + thing.height
    for line in scene.lines:
        assert all(0 <= x <= scene.width and 0 <= y <= scene.height for x, y in line.points)


@EVERY
def test_lines_do_not_run_through_boxes(name: str) -> None:
    """A line moves sideways only between ranks, and downwards only beside boxes."""
    view = draw(GRAPHS[name](), depth=None)
    boxes = view.scene.boxes
    for line in view.scene.lines:
        for (x0, y0), (x1, y1) in itertools.pairwise(line.points):
            assert y1 >= y0 - 1e-6
            if abs(x0 - x1) < 1e-6 and len(boxes) < 300:
                hit = [b for b in boxes if b.x < x0 < b.x + b.width]
                assert not [b for b in hit if y0 < b.y + b.height - 0.01 and y1 > b.y + 0.01]


def reachable(view: GraphView) -> set[tuple[str, str]]:
    return {(view.scene.shown_as.get(line.value, ""), line.target) for line in view.scene.lines}


@EVERY
def test_every_edge_is_drawn(name: str) -> None:
    gm = GRAPHS[name]()
    view = draw(gm, depth=None)
    wanted = {
        (operand.name, node.name)
        for node in gm.graph.nodes
        for operand in node.all_input_nodes
        if node.op != "get_attr"
    }
    assert {(a, b) for a, b in reachable(view) if b} == wanted


def test_like_layers_are_drawn_once() -> None:
    view = draw(models.stack(6))
    assert [f.title for f in view.scene.frames if f.repeats > 1] == ["layers.0 … layers.5 × 6"]
    shown = Counter(box.title for box in view.scene.boxes)
    assert shown["softmax"] == 1
    assert view.nodes == len(models.stack(6).graph.nodes)
    assert view.scene.shown_as["gelu_5"] == "gelu"


def test_a_value_that_all_layers_read_becomes_a_label_at_each() -> None:
    view = draw(models.stack(6), depth=None)
    tags = Counter((tag.value, tag.at_source) for tag in view.scene.tags)
    assert tags["mask", False] == 6
    assert tags["mask", True] == 1


def test_a_closed_module_is_one_box() -> None:
    view = draw(models.stack(2), depth=0)
    box = next(box for box in view.scene.boxes if box.is_module)
    assert (box.title, box.nodes) == ("layers.0 … layers.1 × 2", 26)
    assert not view.scene.frames


def test_auto_depth_keeps_to_its_budget() -> None:
    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList([models.Block(4 + i) for i in range(12)])

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return sum((part(x, mask) for part in self.parts), x)

    gm = fx.symbolic_trace(Deep())
    assert len(draw(gm, depth=None).scene.boxes) > 100
    view = draw(gm, max_nodes=50)
    propagated = [box for box in view.scene.boxes if box.is_module]
    assert len(view.scene.boxes) <= 50
    assert propagated or view.scene.frames


@EVERY
def test_svg_is_valid_and_says_all_labels(name: str) -> None:
    view = draw(GRAPHS[name]())
    root = ET.fromstring(view.svg())
    text = {"".join(node.itertext()) for node in root.iter(f"{SVG}text")}
    assert {box.detail for box in view.scene.boxes if box.detail} <= text
    assert all(any(box.title in t for t in text) for box in view.scene.boxes)
    drawn = [g for g in root.iter(f"{SVG}g") if "fx-n" in (g.get("class") or "").split()]
    assert len(drawn) == len(view.scene.boxes)


def test_labels_are_escaped_everywhere() -> None:
    view = draw(models.hostile())
    assert "<b>" not in view.svg()
    page = view.html()
    assert page.count("</script>") == 3
    assert "<b>&quot;" not in page
    source = view.dot()
    assert "</script>" in source
    assert '"x"' not in source.replace('\\"x\\"', "")


@EVERY
def test_formats_are_written(name: str, tmp_path: Path) -> None:
    view = draw(GRAPHS[name]())
    for kind in ("svg", "html", "dot", "json"):
        path = view.save(tmp_path / f"graph.{kind}")
        assert path.read_text(encoding="utf-8").strip()
    values = json.loads((tmp_path / "graph.json").read_text())
    assert (values["schema"], values["version"]) == ("fxkit.graph", 2)
    assert len(values["columns"]["name"]) == len(view.hierarchy.nodes)


def test_pictures_need_the_dot_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dot_module.shutil, "which", lambda _: None)
    with pytest.raises(UnsupportedError, match=r"`dot` program for a \.png file, got none"):
        draw(models.stack(1)).save(tmp_path / "graph.png")
    assert not list(tmp_path.iterdir())


def put_dot(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize(
    "script",
    ["exec sleep 60", "exit 3", "echo broken >&2; exit 1", "true", "cat", "printf '\\377\\376'"],
    ids=["hangs", "fails", "complains", "says nothing", "echoes", "says no text"],
)
def test_dot_engine_falls_back(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_dot(tmp_path, monkeypatch, script)
    gm = models.stack(1)
    assert draw(gm, engine="dot").svg() == draw(gm).svg()


def test_a_dot_that_is_no_program_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_dot(tmp_path, monkeypatch, "")
    (tmp_path / "dot").write_bytes(b"\x7fELF garbage")
    gm = models.stack(1)
    assert draw(gm, engine="dot").svg() == draw(gm).svg()


@pytest.mark.parametrize("script", ["exec sleep 60", "exit 3", "true"])
def test_pictures_from_a_broken_dot_are_a_clear_error(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_dot(tmp_path, monkeypatch, script)
    monkeypatch.setattr(dot_module, "TIME_LIMIT", 0.2)
    with pytest.raises(UnsupportedError, match="got one that failed or hung"):
        draw(models.stack(1)).save(tmp_path / "graph.pdf")
    assert not (tmp_path / "graph.pdf").exists()


def test_dot_engine_takes_what_the_program_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dot_module, "SVG_TIME_LIMIT", 20.0)
    put_dot(tmp_path, monkeypatch, 'cat > /dev/null\necho "<svg>$1</svg>"')
    assert draw(models.stack(1), engine="dot").svg() == "<svg>-Tsvg</svg>\n"


def test_only_the_dot_engine_runs_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_dot(tmp_path, monkeypatch, f"touch {tmp_path}/was_run; cat > /dev/null; echo '<svg/>'")
    view = draw(models.stack(1))
    for kind in ("svg", "html", "dot", "json"):
        view.save(tmp_path / f"graph.{kind}")
    assert not (tmp_path / "was_run").exists()
    assert "<svg/>" not in (tmp_path / "graph.svg").read_text()


def test_dot_text_has_each_box_and_edge() -> None:
    gm = models.stack(2)
    source = draw(gm, depth=None).dot()
    edges = sum(len(n.all_input_nodes) for n in gm.graph.nodes)
    assert source.count(" -> ") == edges
    assert source.count("subgraph cluster_") == 2


@pytest.mark.parametrize("kwargs", [{"depth": "all"}, {"engine": "neato"}, {"color_by": "heat"}])
def test_bad_arguments_are_refused(kwargs: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="expected"):
        draw(models.stack(1), **kwargs)  # pyright: ignore[reportArgumentType]


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"got 'graph\.bmp'"):
        draw(models.stack(1)).save(tmp_path / "graph.bmp")


def coloured(view: GraphView, prefix: str) -> dict[str, str]:
    classes = view.colouring.classes
    assert classes is not None
    return {name: colour for name, colour in classes.items() if colour.startswith(prefix)}


def test_a_closed_module_has_the_colour_of_the_sum_of_its_nodes() -> None:
    gm = models.stack(6)
    names = [node.name for node in gm.graph.nodes]
    times = {name: 1.0 for name in names if name.startswith("layers_")}
    view = draw(gm, color_by={**times, "head": float(len(times))}, depth=0)
    (module,) = [box for box in view.scene.boxes if box.is_module]
    assert set(module.members) >= set(times)
    steps = coloured(view, "fx-r-")
    assert steps == {module.name: "fx-r-4", "head": "fx-r-4"}
    assert view.colouring.notes is not None
    assert view.colouring.notes[module.name] == f"{len(times)}"


@dataclass(frozen=True)
class Fused:
    name: str
    nodes: tuple[str, ...]
    kernel: str = "kernel_0"


def test_regions_have_colours_of_their_own_and_no_steps() -> None:
    gm = models.stack(1)
    regions = [Fused("region_2", ("softmax", "add")), Fused("region_10", ("gelu", "layers_0_up"))]
    view = draw(gm, color_by="region", regions=regions)
    assert coloured(view, "fx-r-") == {}
    classes = coloured(view, "fx-c-")
    assert classes["softmax"] == classes["add"] != classes["gelu"] == classes["layers_0_up"]
    assert classes["head"] == "fx-c-input"
    legend = view.colouring.legend
    assert legend is not None
    assert [words for _, words in legend] == ["region_2", "region_10", "in no region"]


def test_very_many_words_are_counted_in_the_legend() -> None:
    gm = models.random_graph(40)
    regions = [Fused(f"region_{i}", (node.name,)) for i, node in enumerate(gm.graph.nodes)]
    legend = draw(gm, color_by="region", regions=regions).colouring.legend
    assert legend is not None
    assert len(legend) == 15
    assert legend[-1][1] == f"and {len(regions) - 14} more"


def test_words_on_a_strong_colour_are_not_pale() -> None:
    view = draw(models.stack(1), color_by={"gelu": 3.0})
    root = ET.fromstring(view.svg())
    on = [g.get("data-n") for g in root.iter() if "fx-o" in (g.get("class") or "").split()]
    assert on == ["gelu"]
    assert ".fx-o .fx-d" in view.svg()


def test_colour_by_numbers_and_cost() -> None:
    gm = models.stack(1)
    propagate_types(gm, models.stack_args())
    view = draw(gm, color_by={"gelu": 3.0, "softmax": 1.0})
    assert coloured(view, "fx-r-") == {"gelu": "fx-r-4", "softmax": "fx-r-1"}
    assert "fx-r-4" in view.svg()
    steps = coloured(draw(gm, color_by="flops"), "fx-r-")
    assert steps["layers_0_up"] > steps["layers_0_norm"]
    legend = draw(gm, color_by="dtype").colouring.legend
    assert legend is not None
    assert [words for _, words in legend] == ["f32", "i64"]


def test_what_colours_has_to_be_given() -> None:
    for column, wanted in (("time", "profile"), ("region", "regions"), ("error", "errors")):
        with pytest.raises(UnsupportedError, match=f"pass {wanted}="):
            draw(models.stack(1), color_by=column)
    gm = models.stack(1)
    view = draw(gm, color_by="error", errors={"gelu": 1.0, "add": 0.1})
    assert coloured(view, "fx-r-") == {"gelu": "fx-r-4", "add": "fx-r-0"}
    effects = draw(gm, color_by="effect").colouring.legend
    assert effects is not None
    assert [words for _, words in effects] == ["alias", "pure"]


def names(view: GraphView) -> set[str]:
    return {node.name for node in view.hierarchy.nodes}


def test_a_look_around_a_node() -> None:
    view = draw(models.stack(2))
    near = view.around("softmax", 1)
    assert names(near) == {"add", "softmax", "matmul_1"}
    assert "3 of 31 nodes" in str(near)
    assert names(view.around("softmax", 0)) == {"softmax"}
    assert names(view.around("softmax", 99)) == names(view)
    ET.fromstring(near.svg())


def test_the_paths_between_two_nodes() -> None:
    view = draw(models.stack(1))
    assert names(view.path("mask", "softmax")) == {"mask", "add", "softmax"}
    assert {"layers_0_query", "layers_0_key", "transpose"} <= names(
        view.path("layers_0_norm", "softmax")
    )
    with pytest.raises(UnsupportedError, match="expected a way from %softmax to %mask, got none"):
        view.path("softmax", "mask")
    with pytest.raises(UnsupportedError, match="did you mean softmax"):
        view.path("mask", "softmaxx")


def test_what_a_node_needs_and_who_needs_it() -> None:
    view = draw(models.stack(2))
    before, after = view.slice("softmax_1"), view.slice("softmax_1", forward=True)
    assert names(before) & names(after) == {"softmax_1"}
    assert {"ids", "mask", "gelu"} <= names(before)
    assert {"output", "gelu_1"} <= names(after)


def test_a_path_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no such file or directory"):
        draw(models.stack(1)).save(tmp_path / "missing" / "graph.svg")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(UnsupportedError, match="expected a path that can be written"):
        draw(models.stack(1)).save(tmp_path / "folder.svg")


def test_no_browser_and_no_notebook_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "get", none)
    with pytest.raises(UnsupportedError, match=r"save\('graph.html'\)"):
        draw(models.stack(1)).show()


def test_a_browser_is_shown_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    class Browser:
        opened: str = ""

        def open(self, address: str) -> None:
            self.opened = address

    browser = Browser()
    monkeypatch.setattr(webbrowser, "get", lambda: browser)
    draw(models.stack(1)).show()
    path = Path(browser.opened.removeprefix("file://"))
    assert "fx-viewer" in path.read_text()
    path.unlink()


@DEPTHS
@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_value_that_leaves_one_of_the_folded_layers_leaves_their_frame(
    depth: int | str | None, last: int
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(models.TwoResults() for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seconds = []
            for layer in self.layers:
                x, second = layer(x)
                seconds.append(second)
            return x, seconds[last]

    view = draw(fx.symbolic_trace(Model()), depth=depth)
    assert (f"layers_{last}_inner", "output") in {(e.value, e.target) for e in view.scene.lines}


def test_a_value_that_leaves_one_repetition_leaves_their_frame() -> None:
    graph = fx.Graph()
    x = total = graph.placeholder("x")
    for _ in range(1000):
        x = graph.call_function(torch.relu, (x,))
        total = graph.call_method("sum", (x,))
    graph.output((x, total))
    view = draw(fx.GraphModule(torch.nn.Module(), graph), depth=None)
    assert (total.name, "output") in {(e.value, e.target) for e in view.scene.lines}


def test_drawing_is_deterministic() -> None:
    assert draw(models.random_graph(60)).svg() == draw(models.random_graph(60)).svg()


def test_notebooks_get_text_svg_and_a_frame_that_leaks_no_style() -> None:
    gm = models.stack(1)
    bundle = draw(gm)._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/svg+xml", "text/html"}
    for value in (draw(gm), tree(gm), diff(gm, gm), Report("r").add_tree(gm)):
        html = value._repr_mimebundle_()["text/html"]
        assert html.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
        assert "<style" not in html


def test_a_profile_marks_what_takes_the_time() -> None:
    gm = models.stack(2)
    measured = models.quick(gm, models.stack_args())
    assert draw(gm, profile=measured).to_dict()["colour"] == "seconds"
    assert draw(gm, profile=measured, color_by="family").to_dict()["colour"] == "family"
    assert draw(gm).to_dict()["colour"] == "family"


def test_a_drawing_in_a_page_follows_the_theme_of_the_page() -> None:
    drawn = draw(models.stack(1)).svg()
    for theme in ("light", "dark"):
        assert f"[data-theme={theme}] " in drawn and f":root[data-theme={theme}]" not in drawn
