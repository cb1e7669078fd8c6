"""A scene in the DOT language, and the `dot` program where it is installed."""

from __future__ import annotations

import shutil
import subprocess

from fxkit.errors import UnsupportedError
from fxkit.view.scene import Box, Frame, Scene
from fxkit.view.theme import FAMILY_COLOURS, LIGHT

TIME_LIMIT = 20.0
"""Seconds after which `dot` is stopped."""


def source(scene: Scene, title: str) -> str:
    """Return the boxes, frames and edges of a scene as DOT text; all labels are escaped."""
    import graphviz

    graph = graphviz.Digraph(title)
    graph.attr(rankdir="TB", fontname="Helvetica", nodesep="0.3", ranksep="0.35")
    graph.attr("node", shape="box", style="rounded,filled", fontname="Helvetica", fontsize="11")
    graph.attr("edge", color=LIGHT["edge"], arrowsize="0.7")
    _fill(graph, scene, None)
    boxes = {box.name: f"n{i}" for i, box in enumerate(scene.boxes)}
    edges = {(line.value, line.target): None for line in scene.lines if line.target}
    makers = _makers(scene)
    for value, target in edges:
        start = boxes.get(value) or boxes.get(makers.get(value, ""))
        if start and target in boxes:
            graph.edge(start, boxes[target])
    return graph.source


def render(text: str, kind: str) -> bytes | None:
    """Run `dot`; None when it is missing, fails, or takes longer than `TIME_LIMIT`."""
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, f"-T{kind}"],
            input=text.encode(),
            capture_output=True,
            timeout=TIME_LIMIT,
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
    picture = render(text, kind)
    if picture is None:
        state = "none on the PATH" if shutil.which("dot") is None else "one that failed or hung"
        raise UnsupportedError(
            f"expected the `dot` program for a .{kind} file, got {state}",
            hint="save as .svg or .html, which need no program, or install graphviz",
        )
    return picture


def _fill(graph, scene: Scene, _parent: None) -> None:
    """Write frames as nested clusters, each with the boxes that lie in it."""
    import graphviz

    inside: dict[int, list[int]] = {}
    for i, box in enumerate(scene.boxes):
        inside.setdefault(_around(scene, box), []).append(i)
    clusters = []
    for i, frame in enumerate(scene.frames):
        cluster = graphviz.Digraph(f"cluster_{i}")
        cluster.attr(
            label=graphviz.escape(f"{frame.title}  {frame.kind}"),
            style="rounded",
            color=LIGHT["frame"],
            fontname="Helvetica",
            fontsize="11",
            labeljust="l",
        )
        clusters.append(cluster)
    for i in range(len(clusters), -1, -1):
        here = graph if i == 0 else clusters[i - 1]
        for index in inside.get(i - 1, []):
            _node(here, f"n{index}", scene.boxes[index])
        if i:
            parent = _around(scene, scene.frames[i - 1])
            (graph if parent < 0 else clusters[parent]).subgraph(here)


def _node(graph, name: str, box: Box) -> None:
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


def _around(scene: Scene, thing: Box | Frame) -> int:
    """Return the index of the innermost frame around a box or frame, or -1."""
    found = -1
    for i, frame in enumerate(scene.frames):
        if frame is thing:
            continue
        if (
            frame.x <= thing.x
            and frame.y <= thing.y
            and frame.x + frame.width >= thing.x + thing.width
            and frame.y + frame.height >= thing.y + thing.height
        ):
            found = i
    return found


def _makers(scene: Scene) -> dict[str, str]:
    return {}
