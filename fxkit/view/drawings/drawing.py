"""Draw a graph: boxes for nodes, frames for modules, repeated layers once."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.view.drawings import dot, svg
from fxkit.view.drawings.colouring import COLUMNS, Colouring, Columns, check_column, colouring
from fxkit.view.drawings.graph_data import as_json, graph_data
from fxkit.view.drawings.hierarchy import Hierarchy, ModuleGroup
from fxkit.view.drawings.neighbourhood import around, between, needed_by, used_from
from fxkit.view.drawings.scene import build_scene
from fxkit.view.drawings.shapes import Scene
from fxkit.view.drawings.viewer import viewer_html
from fxkit.view.pages.page import fragment_page, notebook_bundle, write_file
from fxkit.view.pages.showing import show
from fxkit.view.profiling.profile_result import Profile
from fxkit.view.texts.subject import graph_module_of
from fxkit.view.texts.text_table import plural


@dataclass(frozen=True, repr=False)
class GraphView:
    """What `draw` returns: save it, look closer, or let a notebook show it.

    Attributes:
        title: Name of what is drawn.
        nodes: Number of nodes in the graph: parameters, inputs, the output and what lies in closed
            and folded modules included.
        hierarchy: The groups that the drawing is made from.
        opened: The groups whose insides are shown.
        columns: What is known of nodes beside the graph: times, errors, regions.
        column: The column of the data that colours.
        engine: `builtin` or `dot`: what places the boxes in SVG.
        is_overview: Whether a page may open fewer levels at first, so that all of it can be read.
    """

    title: str
    nodes: int
    hierarchy: Hierarchy
    opened: frozenset[ModuleGroup]
    columns: Columns
    column: str
    engine: str
    is_overview: bool = False

    @functools.cached_property
    def scene(self) -> Scene:
        """Boxes, frames and lines with their coordinates."""
        return build_scene(self.hierarchy, set(self.opened))

    @functools.cached_property
    def colouring(self) -> Colouring:
        """Colours and notes of boxes, and the legend, where not the family colours."""
        return colouring(self.hierarchy, self.scene, self.column, self.columns)

    def __str__(self) -> str:
        shown = self.hierarchy.size
        part = "" if shown == self.nodes else f"{shown:,} of "
        boxes = plural(_boxes(self.opened), "box").replace("boxs", "boxes")
        return f"{self.title}: {part}{plural(self.nodes, 'node')}, drawn as {boxes}"

    __repr__ = __str__

    def around(self, node: fx.Node | str, radius: int = 2) -> GraphView:
        """Draw what lies within `radius` steps of a node, along and against the flow of values."""
        return self._part(around(self.hierarchy, node, radius), f"around {_name(node)}")

    def path(self, first: fx.Node | str, last: fx.Node | str) -> GraphView:
        """Draw all nodes on the ways from one node to another.

        Raises:
            UnsupportedError: There is no way from the first to the last, or no such node.
        """
        found = between(self.hierarchy, first, last)
        if not found:
            raise UnsupportedError(
                f"expected a way from %{_name(first)} to %{_name(last)}, got none",
                hint="values flow from the first to the last: try them the other way round",
            )
        return self._part(found, f"from {_name(first)} to {_name(last)}")

    def slice(self, node: fx.Node | str, *, forward: bool = False) -> GraphView:
        """Draw all that a node's value depends on; with `forward` all that depends on it."""
        if forward:
            return self._part(used_from(self.hierarchy, node), f"all that uses {_name(node)}")
        return self._part(needed_by(self.hierarchy, node), f"all that {_name(node)} needs")

    def _part(self, nodes: set[fx.Node], words: str) -> GraphView:
        hierarchy = Hierarchy(self.hierarchy.graph_module, fold=False, only=nodes)
        return GraphView(
            title=f"{self.title}, {words}",
            nodes=self.nodes,
            hierarchy=hierarchy,
            opened=frozenset(opened_groups(hierarchy.root, None, 0)),
            columns=self.columns,
            column=self.column,
            engine=self.engine,
        )

    def svg(self) -> str:
        """Return the drawing as SVG text."""
        if self.engine == "dot" and len(self.scene.boxes) <= dot.SVG_BOXES:
            rendered = dot.render(self.dot(), "svg", dot.SVG_TIME_LIMIT)
            if rendered is not None and b"<svg" in rendered:
                return rendered.decode("utf-8", "replace")
        return svg.render(
            self.scene,
            title=str(self),
            legend=self.colouring.legend,
            classes=self.colouring.classes,
            notes=self.colouring.notes,
        )

    def html(self) -> str:
        """Return one page with a viewer of the graph; it needs no network."""
        return fragment_page(self.title, self.html_fragment(), kind="fx-full")

    def html_fragment(self) -> str:
        """Return the viewer as HTML without a page around it."""
        return viewer_html({**self.to_dict(), "overview": self.is_overview}, str(self))

    def dot(self) -> str:
        """Return the drawing in the DOT language."""
        return dot.source(self.scene, self.title)

    def to_dict(self) -> dict[str, Any]:
        """Return nodes, edges and modules as plain values: the schema of `graph_data`."""
        return graph_data(
            self.hierarchy,
            self.opened,
            title=self.title,
            total=self.nodes,
            colour=self.column,
            numbers=self.columns.numbers,
            texts=self.columns.texts,
        )

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON."""
        return as_json(self.to_dict(), indent=indent)

    def save(self, path: str | Path) -> Path:
        """Write the drawing to a file; the suffix tells how.

        Args:
            path: Ends in `.svg`, `.html`, `.dot` or `.json`; with the `dot` program on the PATH
                also in `.png` or `.pdf`.

        Returns:
            The path that was written.

        Raises:
            UnsupportedError: The suffix is unknown, needs a program that isn't there, or the path
                can't be written.
        """
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        writers = {"svg": self.svg, "html": self.html, "dot": self.dot, "json": self.to_json}
        if kind in writers:
            write_file(path, writers[kind]().encode())
        elif kind in ("png", "pdf"):
            write_file(path, dot.render_or_raise(self.dot(), kind))
        else:
            raise UnsupportedError(
                f"expected a path that ends in .svg, .html, .dot, .json, .png or .pdf, "
                f"got {path.name!r}",
                hint="add the suffix of the format that you want, for example graph.svg",
            )
        return path

    def show(self) -> None:
        """Show the drawing: below the cell in a notebook, in a browser elsewhere.

        Raises:
            UnsupportedError: There is neither a notebook nor a browser.
        """
        show(self, self.html)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return notebook_bundle(str(self), self.html(), 640, svg=self.svg())


def draw(
    gm: Any,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    depth: int | str | None = "auto",
    color_by: str | Mapping[str, float] | None = None,
    engine: str = "auto",
    max_nodes: int = 160,
    profile: Profile | None = None,
    regions: Iterable[Any] | None = None,
    errors: Mapping[str, float] | None = None,
) -> GraphView:
    """Draw a graph in layers, from inputs at the top to outputs at the bottom.

    Modules become frames; layers that are alike and follow each other are drawn once, `× n`. A
    value that many far-apart nodes read is drawn as a label at each of them.

    Args:
        gm: A graph module, or a captured or compiled program that holds one; shapes are shown
            where the nodes carry them. With inputs, any callable: it is captured.
        args: Inputs to capture with.
        kwargs: More inputs, by name.
        depth: How many levels of modules are opened. `"auto"` opens as many as `max_nodes` allows;
            None opens all and folds none.
        color_by: `"family"` (what kind of operator; the default without a profile), `"time"` (the
            default with one), `"flops"`, `"bytes"`, `"dtype"`,
            `"effect"`, `"region"`, `"error"`, or a number for each node name. An HTML page can
            change between all that is known.
        engine: `"builtin"` places boxes here; `"dot"` asks the `dot` program, and falls back
            when it is missing, fails, takes longer than 0.4 seconds, or has more than 400
            boxes to place; `"auto"` is `"builtin"`.
        max_nodes: How many boxes `depth="auto"` shows.
        profile: What `fxkit.profile` measured of this graph, to colour by time.
        regions: The regions of a compiled module, to colour by them.
        errors: For node names their error against a reference.

    Returns:
        A value that a notebook shows, with `.around(node)`, `.svg()`, `.html()`, `.save(path)`.

    Raises:
        UnsupportedError: An argument has a value that it can't have.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
        >>> view = fxkit.draw(gm, color_by="family")
        >>> view
        Sequential: 4 nodes, drawn as 4 boxes
        >>> print(view.save("model.svg"))
        model.svg
    """
    _check(engine, depth)
    gm = graph_module_of(gm, args, kwargs)
    columns = _columns(color_by, profile, regions, errors)
    if isinstance(color_by, Mapping):
        column = "value"
    else:
        color_by = color_by or ("family" if profile is None else "time")
        check_column(color_by, columns)
        column = COLUMNS[color_by]
    hierarchy = Hierarchy(gm, fold=depth is not None)
    return GraphView(
        title=type(gm).__name__ if type(gm).__name__ != "GraphModule" else "graph",
        nodes=hierarchy.size,
        hierarchy=hierarchy,
        opened=frozenset(opened_groups(hierarchy.root, depth, max_nodes)),
        is_overview=depth == "auto",
        columns=columns,
        column=column,
        engine="dot" if engine == "dot" else "builtin",
    )


def _check(engine: str, depth: int | str | None) -> None:
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


def _columns(
    color_by: str | Mapping[str, float] | None,
    profile: Profile | None,
    regions: Iterable[Any] | None,
    errors: Mapping[str, float] | None,
) -> Columns:
    numbers: dict[str, Mapping[str, float]] = {}
    texts: dict[str, Mapping[str, str]] = {}
    if isinstance(color_by, Mapping):
        numbers["value"] = {name: float(value) for name, value in color_by.items()}
    if profile is not None and not isinstance(profile, Profile):
        raise UnsupportedError(
            f"expected profile to be a Profile, got {type(profile).__name__}",
            hint="fxkit.profile(gm, args) returns one",
        )
    if profile is not None:
        times = {row.name: row.seconds for row in profile.rows if row.seconds is not None}
        numbers["seconds"] = times
    if errors is not None:
        numbers["error"] = dict(errors)
    if regions is not None:
        fused = [region for region in regions if region.kernel is not None]
        texts["region"] = {name: region.name for region in fused for name in region.nodes}
    return Columns(numbers, texts)


def opened_groups(root: ModuleGroup, depth: int | str | None, max_nodes: int) -> set[ModuleGroup]:
    """Choose the groups to open, level by level; the smallest of a level first."""
    opened = {root}
    shown = len(root.items)
    level = deque(_inner(root))
    steps = 0
    while level and (not isinstance(depth, int) or steps < depth):
        steps += 1
        below: list[ModuleGroup] = []
        for group in sorted(level, key=lambda group: len(group.items)):
            if depth == "auto" and shown + len(group.items) - 1 > max_nodes:
                continue
            opened.add(group)
            shown += len(group.items) - 1
            below.extend(_inner(group))
        level = deque(below)
    return opened


def _inner(group: ModuleGroup) -> list[ModuleGroup]:
    return [item for item in group.items if isinstance(item, ModuleGroup) and item.only is None]


def _boxes(opened: frozenset[ModuleGroup]) -> int:
    """Count the boxes of a drawing: what lies in open groups and is no open group."""
    return sum(
        not (isinstance(item, ModuleGroup) and item in opened)
        for group in opened
        for item in group.items
    )


def _name(node: fx.Node | str) -> str:
    return node if isinstance(node, str) else node.name
