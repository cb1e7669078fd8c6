"""Draw a graph: boxes for nodes, frames for modules, repeated layers once."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxkit.errors import UnsupportedError
from fxkit.view import dot, svg
from fxkit.view.hierarchy import Group, Hierarchy
from fxkit.view.page import escape, fragment_page, notebook_bundle
from fxkit.view.scene import Scene, build_scene
from fxkit.view.subject import graph_module_of
from fxkit.view.text_table import plural, quantity

VERSION = 1
"""Version of the dictionaries that `GraphView.to_dict` returns."""

COLOURINGS = ("family", "flops", "bytes", "dtype")
"""What `draw(color_by=...)` takes besides a mapping from node names to numbers."""


@dataclass(frozen=True, repr=False)
class GraphView:
    """What `draw` returns: save it, or let a notebook show it.

    Attributes:
        title: Name of what is drawn.
        scene: Boxes, frames and lines with their coordinates.
        nodes: Number of nodes in the graph, those in closed and folded modules included.
        hierarchy: The groups that the drawing was made from.
        colouring: Steps of colour and notes of boxes, and the legend, where a number colours.
        engine: `builtin` or `dot`: what places the boxes in SVG and HTML.
    """

    title: str
    scene: Scene
    nodes: int
    hierarchy: Hierarchy
    colouring: Colouring
    engine: str

    def __str__(self) -> str:
        shown = plural(len(self.scene.boxes), "box")
        return (
            f"{self.title}: {plural(self.nodes, 'node')}, drawn as {shown.replace('boxs', 'boxes')}"
        )

    __repr__ = __str__

    def svg(self) -> str:
        """Return the drawing as SVG text."""
        if self.engine == "dot":
            rendered = dot.render(self.dot(), "svg")
            if rendered is not None:
                return rendered.decode()
        return svg.render(
            self.scene,
            title=str(self),
            legend=self.colouring.legend,
            levels=self.colouring.levels,
            notes=self.colouring.notes,
        )

    def html(self) -> str:
        """Return one page with the drawing to move, zoom and search in; it needs no network."""
        return fragment_page(self.title, self.html_fragment(), kind="fx-full")

    def html_fragment(self) -> str:
        """Return the drawing with its controls as HTML without a page around it."""
        return (
            f'<div class="fx-viewer" tabindex="0" aria-label="{escape(str(self))}">'
            f'<div class="fx-bar"><b>{escape(self.title)}</b>'
            f'<span class="fx-muted">{plural(self.nodes, "node")}</span>'
            '<input type="search" placeholder="search: name, operator, shape (regular expression)" '
            'aria-label="search"><output></output>'
            '<button data-do="fit" title="fit (0)">fit</button>'
            '<button data-do="out" title="smaller (-)">−</button>'
            '<button data-do="in" title="larger (+)">+</button></div>'
            f'<div class="fx-canvas">{self.svg()}</div>'
            '<div class="fx-info" aria-live="polite">point at a box to see what it is; '
            "drag to move, wheel to zoom</div></div>"
        )

    def dot(self) -> str:
        """Return the drawing in the DOT language."""
        return dot.source(self.scene, self.title)

    def to_dict(self) -> dict[str, Any]:
        """Return boxes, frames and lines as plain values, with a `version` on top."""
        return {"version": VERSION, "title": self.title, "nodes": self.nodes, **asdict(self.scene)}

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def save(self, path: str | Path) -> Path:
        """Write the drawing to a file; the suffix tells how.

        Args:
            path: Ends in `.svg`, `.html`, `.dot` or `.json`; with the `dot` program on the PATH
                also in `.png` or `.pdf`.

        Returns:
            The path that was written.

        Raises:
            UnsupportedError: The suffix is unknown, or needs a program that isn't there.
        """
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        writers = {"svg": self.svg, "html": self.html, "dot": self.dot, "json": self.to_json}
        if kind in writers:
            path.write_text(writers[kind](), encoding="utf-8")
        elif kind in ("png", "pdf"):
            path.write_bytes(dot.render_or_raise(self.dot(), kind))
        else:
            raise UnsupportedError(
                f"expected a path that ends in .svg, .html, .dot, .json, .png or .pdf, "
                f"got {path.name!r}",
                hint="add the suffix of the format that you want, for example graph.svg",
            )
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return notebook_bundle(str(self), self.html(), 640, svg=self.svg())


@dataclass(frozen=True)
class Colouring:
    """How boxes are coloured where a number colours them.

    Attributes:
        levels: For each box its step from 0 to 4; None for colours by family.
        notes: For each box the number as text.
        legend: Colour class and words of each step; None for the families.
    """

    levels: Mapping[str, int] | None = None
    notes: Mapping[str, str] | None = None
    legend: tuple[tuple[str, str], ...] | None = None


def draw(
    gm: Any,
    *,
    depth: int | str | None = "auto",
    color_by: str | Mapping[str, float] | None = None,
    engine: str = "auto",
    max_nodes: int = 160,
) -> GraphView:
    """Draw a graph in layers, from inputs at the top to outputs at the bottom.

    Modules become frames; layers that are alike and follow each other are drawn once, `× n`. A
    value that many far-apart nodes read is drawn as a label at each of them.

    Args:
        gm: A graph module, or a captured or compiled program that holds one; shapes are shown
            where the nodes carry them.
        depth: How many levels of modules are opened. `"auto"` opens as many as `max_nodes` allows;
            None opens all and folds none.
        color_by: `"family"` (what kind of operator), `"flops"`, `"bytes"`, `"dtype"`, or a number
            for each node name, such as seconds.
        engine: `"builtin"` places boxes here; `"dot"` asks the `dot` program, and falls back
            when it is missing or takes too long; `"auto"` is `"builtin"`.
        max_nodes: How many boxes `depth="auto"` shows.

    Raises:
        UnsupportedError: An argument has a value that it can't have.
    """
    if engine not in ("auto", "builtin", "dot"):
        raise UnsupportedError(
            f"expected engine to be 'auto', 'builtin' or 'dot', got {engine!r}",
            hint="leave it out: the builtin engine needs no program",
        )
    if not (depth is None or depth == "auto" or (isinstance(depth, int) and depth >= 0)):
        raise UnsupportedError(
            f"expected depth to be 'auto', None or a count of levels, got {depth!r}",
            hint="depth=1 opens the outermost modules",
        )
    gm = graph_module_of(gm)
    hierarchy = Hierarchy(gm, fold=depth is not None)
    opened = _opened(hierarchy.root, depth, max_nodes)
    scene = build_scene(hierarchy, opened)
    return GraphView(
        title=type(gm).__name__ if type(gm).__name__ != "GraphModule" else "graph",
        scene=scene,
        nodes=len(hierarchy.nodes),
        hierarchy=hierarchy,
        colouring=_colouring(hierarchy, scene, color_by),
        engine="dot" if engine == "dot" else "builtin",
    )


def _opened(root: Group, depth: int | str | None, max_nodes: int) -> set[Group]:
    """Choose the groups to open, level by level; the smallest of a level first."""
    opened = {root}
    shown = len(root.items)
    level = deque(_inner(root))
    steps = 0
    while level and (not isinstance(depth, int) or steps < depth):
        steps += 1
        below: list[Group] = []
        for group in sorted(level, key=lambda group: len(group.items)):
            if depth == "auto" and shown + len(group.items) - 1 > max_nodes:
                continue
            opened.add(group)
            shown += len(group.items) - 1
            below.extend(_inner(group))
        level = deque(below)
    return opened


def _inner(group: Group) -> list[Group]:
    return [item for item in group.items if isinstance(item, Group) and item.only is None]


def _colouring(
    hierarchy: Hierarchy, scene: Scene, color_by: str | Mapping[str, float] | None
) -> Colouring:
    if color_by is None or color_by == "family":
        return Colouring()
    if isinstance(color_by, Mapping):
        return _by_number(scene, {name: float(value) for name, value in color_by.items()}, "")
    if color_by == "dtype":
        return _by_dtype(scene)
    if color_by not in COLOURINGS:
        raise UnsupportedError(
            f"expected color_by to be one of {', '.join(COLOURINGS)} or a mapping from node names "
            f"to numbers, got {color_by!r}",
            hint="leave it out to colour by the family of the operator",
        )
    from fxkit.analysis.cost import cost_of

    costs = {node.name: getattr(cost_of(node), color_by) for node in hierarchy.nodes}
    known = {name: float(cost) for name, cost in costs.items() if cost is not None}
    return _by_number(scene, known, "FLOP" if color_by == "flops" else "B")


def _by_number(scene: Scene, values: Mapping[str, float], unit: str) -> Colouring:
    most = max(values.values(), default=0.0) or 1.0
    levels = {name: min(4, int(5 * max(value, 0.0) / most)) for name, value in values.items()}
    notes = {name: quantity(value, unit) for name, value in values.items()}
    words = [f"≤ {quantity(most * (i + 1) / 5, unit)}" for i in range(5)]
    legend = [(f"fx-r-{i}", text) for i, text in enumerate(words)]
    if any(box.name not in levels for box in scene.boxes):
        legend.append(("fx-c-layout", "not known, or several nodes"))
    return Colouring(levels, notes, tuple(legend))


def _by_dtype(scene: Scene) -> Colouring:
    kinds = sorted({_dtype(box.detail) for box in scene.boxes} - {""})
    levels = {
        box.name: kinds.index(_dtype(box.detail)) % 5 for box in scene.boxes if _dtype(box.detail)
    }
    legend = [(f"fx-r-{i % 5}", kind) for i, kind in enumerate(kinds)]
    return Colouring(levels, None, tuple(legend))


def _dtype(detail: str) -> str:
    head = detail.partition("[")[0]
    return head if head and head.isalnum() and "[" in detail else ""
