"""A scene in the DOT language, and the `dot` program where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from fxkit.errors import UnsupportedError
from fxkit.view.drawings.shapes import Box, Scene
from fxkit.view.texts.theme import FAMILY_COLOURS, LIGHT

TIME_LIMIT = 20.0
"""Seconds after which `dot` is stopped where nothing else writes the format."""

SVG_TIME_LIMIT = 0.4
"""Seconds after which `dot` is stopped for a picture that needs no program."""

SVG_BOXES = 400
"""The most boxes that `dot` is asked to place for such a picture: a hundred take it a tenth of a
second, a thousand many seconds, and then the wait would be for nothing."""


def source(scene: Scene, title: str) -> str:
    """Return the boxes, frames and edges of a scene as DOT text; all labels are escaped."""
    import graphviz

    graph = graphviz.Digraph(title)
    graph.attr(rankdir="TB", fontname="Helvetica", nodesep="0.3", ranksep="0.35")
    graph.attr("node", shape="box", style="rounded,filled", fontname="Helvetica", fontsize="11")
    graph.attr("edge", color=LIGHT["edge"], arrowsize="0.7")
    _fill(graph, scene)
    numbers = {box.name: f"n{i}" for i, box in enumerate(scene.boxes)}
    for value, target in {(line.value, line.target): None for line in scene.lines if line.target}:
        graph.edge(numbers[scene.shown_as[value]], numbers[target])
    return graph.source


def render(text: str, kind: str, limit: float) -> bytes | None:
    """Run `dot`; None when it is missing, fails, or takes longer than `limit` seconds."""
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, f"-T{kind}"],
            input=text.encode(),
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout if done.returncode == 0 and done.stdout else None


def render_or_raise(text: str, kind: str) -> bytes:
    """Run `dot`.

    Raises:
        UnsupportedError: When it gave no picture; the hint says what needs no program.
    """
    picture = render(text, kind, TIME_LIMIT)
    if picture is None:
        state = "none on the PATH" if shutil.which("dot") is None else "one that failed or hung"
        raise UnsupportedError(
            f"expected the `dot` program for a .{kind} file, got {state}",
            hint="save as .svg or .html, which need no program, or install graphviz",
        )
    return picture


def _fill(graph: Any, scene: Scene) -> None:
    """Write frames as nested clusters, each with the boxes that lie in it."""
    import graphviz

    clusters = [graphviz.Digraph(f"cluster_{i}") for i in range(len(scene.frames))]
    for cluster, frame in zip(clusters, scene.frames, strict=True):
        cluster.attr(
            label=graphviz.escape(f"{frame.title}  {frame.kind}"),
            style="rounded",
            color=LIGHT["frame"],
            fontname="Helvetica",
            fontsize="11",
            labeljust="l",
        )
    for i, box in enumerate(scene.boxes):
        _node(graph if box.frame < 0 else clusters[box.frame], f"n{i}", box)
    for cluster, frame in reversed(list(zip(clusters, scene.frames, strict=True))):
        (graph if frame.frame < 0 else clusters[frame.frame]).subgraph(cluster)


def _node(graph: Any, name: str, box: Box) -> None:
    import graphviz

    fill, border, _, _ = FAMILY_COLOURS[box.family]
    head = f"{box.title}  {box.note}".strip()
    graph.node(
        name,
        label=graphviz.escape(head) + (f"\\n{graphviz.escape(box.detail)}" if box.detail else ""),
        tooltip=graphviz.escape(f"{box.operator} {box.source}".strip()),
        fillcolor=fill,
        color=border,
    )
