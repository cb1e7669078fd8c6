"""What the colours of a drawing stand for: kinds of operators, numbers, or words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.view.costs import costs_of
from fxkit.view.graph_data import effect_word
from fxkit.view.hierarchy import Hierarchy
from fxkit.view.shapes import Scene
from fxkit.view.text_table import duration, quantity

COLUMNS = {
    "family": "family",
    "time": "seconds",
    "flops": "flops",
    "bytes": "bytes",
    "dtype": "dtype",
    "effect": "effect",
    "region": "region",
    "error": "error",
}
"""What `draw(color_by=...)` takes, and the column of the data that each is written in."""


@dataclass(frozen=True)
class Columns:
    """What is known of nodes beside the graph, by node name.

    Attributes:
        numbers: Columns of numbers: `seconds`, `error`, `value`.
        texts: Columns of words: `region`.
    """

    numbers: Mapping[str, Mapping[str, float]]
    texts: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Colouring:
    """How boxes are coloured where something else than the family colours them.

    Attributes:
        levels: For each box its step from 0 to 4; None for colours by family.
        notes: For each box the number as text.
        legend: Colour class and words of each step; None for the families.
    """

    levels: Mapping[str, int] | None = None
    notes: Mapping[str, str] | None = None
    legend: tuple[tuple[str, str], ...] | None = None


def check_column(column: str, columns: Columns) -> None:
    """Refuse a colouring that nothing is known for.

    Raises:
        UnsupportedError: It is not one of `COLUMNS`, or its values were not given.
    """
    wanted = {"time": "profile", "region": "regions", "error": "errors"}.get(column)
    if column not in COLUMNS:
        raise UnsupportedError(
            f"expected color_by to be one of {', '.join(COLUMNS)} or a mapping from node names "
            f"to numbers, got {column!r}",
            hint="leave it out to colour by the family of the operator",
        )
    if wanted and COLUMNS[column] not in {**columns.numbers, **columns.texts}:
        raise UnsupportedError(
            f"expected what to colour by {column} with, got none",
            hint=f"pass {wanted}=... to draw",
        )


def colouring(hierarchy: Hierarchy, scene: Scene, column: str, columns: Columns) -> Colouring:
    """Return the colours of the boxes of a scene.

    Args:
        hierarchy: The nodes.
        scene: Their boxes.
        column: A column of the data: one of the values of `COLUMNS`, or `value`.
        columns: What is known beside the graph.
    """
    if column == "family":
        return Colouring()
    if column in columns.numbers:
        return _by_number(scene, columns.numbers[column], column)
    if column in ("flops", "bytes"):
        costs = zip(hierarchy.nodes, costs_of(hierarchy.nodes), strict=True)
        known = {node.name: getattr(cost, column) for node, cost in costs}
        return _by_number(scene, {n: float(c) for n, c in known.items() if c is not None}, column)
    return _by_word(scene, _words(hierarchy.nodes, scene, column, columns))


def _words(
    nodes: Sequence[fx.Node], scene: Scene, column: str, columns: Columns
) -> Mapping[str, str]:
    if column == "dtype":
        return {box.name: _dtype(box.detail) for box in scene.boxes}
    if column == "effect":
        return {node.name: effect_word(node) for node in nodes}
    return columns.texts[column]


def _by_number(scene: Scene, values: Mapping[str, float], column: str) -> Colouring:
    most = max(values.values(), default=0.0) or 1.0
    levels = {name: min(4, int(5 * max(value, 0.0) / most)) for name, value in values.items()}
    notes = {name: _number(value, column) for name, value in values.items()}
    words = [f"≤ {_number(most * (i + 1) / 5, column)}" for i in range(5)]
    legend = [(f"fx-r-{i}", text) for i, text in enumerate(words)]
    if any(box.name not in levels for box in scene.boxes):
        legend.append(("fx-c-layout", "not known, or several nodes"))
    return Colouring(levels, notes, tuple(legend))


def _number(value: float, column: str) -> str:
    if column == "seconds":
        return duration(value)
    if column == "error":
        return f"{value:.2e}"
    return quantity(value, {"flops": "FLOP", "bytes": "B"}.get(column, ""))


def _by_word(scene: Scene, words: Mapping[str, str]) -> Colouring:
    """Give each word a colour; beyond five words colours repeat."""
    shown = {box.name: words[box.name] for box in scene.boxes if words.get(box.name)}
    kinds = sorted(set(shown.values()))
    levels = {name: kinds.index(word) % 5 for name, word in shown.items()}
    legend = [(f"fx-r-{i % 5}", kind) for i, kind in enumerate(kinds)]
    return Colouring(levels, shown, tuple(legend))


def _dtype(detail: str) -> str:
    head = detail.partition("[")[0]
    return head if head and head.isalnum() and "[" in detail else ""
