"""What the colours of a drawing stand for: kinds of operators, numbers, or words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.view.drawings.graph_data import effect_word
from fxkit.view.drawings.hierarchy import Hierarchy
from fxkit.view.drawings.shapes import Scene
from fxkit.view.profiling.costs import costs_of
from fxkit.view.texts.text_table import duration, quantity

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
        classes: For each box its colour class; None for colours by family.
        notes: For each box the number or the word as text.
        legend: Colour class and words of each colour; None for the families.
    """

    classes: Mapping[str, str] | None = None
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
    return _by_word(scene, _words(hierarchy.nodes, scene, column, columns), column)


def _words(
    nodes: Sequence[fx.Node], scene: Scene, column: str, columns: Columns
) -> Mapping[str, str]:
    if column == "dtype":
        return {box.name: _dtype(box.detail) for box in scene.boxes}
    if column == "effect":
        return {node.name: effect_word(node) for node in nodes}
    return columns.texts[column]


_UNKNOWN = "fx-c-layout"
_NO_WORD = "fx-c-input"
_WORDS_SHOWN = 14
_SEVERAL = "\0several"


def _by_number(scene: Scene, of_nodes: Mapping[str, float], column: str) -> Colouring:
    """Give each number a step from little to much; a closed module has the sum of its nodes."""
    values: dict[str, float] = {}
    for box in scene.boxes:
        known = [of_nodes[name] for name in box.members if name in of_nodes]
        if known:
            values[box.name] = max(known) if column == "error" else sum(known)
    most = max(values.values(), default=0.0) or 1.0
    steps = {name: min(4, int(5 * max(value, 0.0) / most)) for name, value in values.items()}
    classes = {box.name: _UNKNOWN for box in scene.boxes}
    classes.update({name: f"fx-r-{step}" for name, step in steps.items()})
    notes = {name: _number(value, column) for name, value in values.items()}
    words = [f"≤ {_number(most * (i + 1) / 5, column)}" for i in range(5)]
    legend = [(f"fx-r-{i}", text) for i, text in enumerate(words)]
    if _UNKNOWN in classes.values():
        legend.append((_UNKNOWN, "not known"))
    return Colouring(classes, notes, tuple(legend))


def _number(value: float, column: str) -> str:
    if column == "seconds":
        return duration(value)
    if column == "error":
        return f"{value:.2e}"
    return quantity(value, {"flops": "FLOP", "bytes": "B"}.get(column, ""))


_CYCLE = ("contraction", "pointwise", "reduction", "lookup", "kernel", "other", "opaque")
_EFFECTS = {
    "pure": "layout",
    "alias": "contraction",
    "writes": "kernel",
    "random": "reduction",
    "mode": "lookup",
    "check": "pointwise",
    "unknown": "opaque",
}


def _by_word(scene: Scene, of_nodes: Mapping[str, str], column: str) -> Colouring:
    """Give each word a colour, those of the viewer; beyond seven words colours repeat."""
    words: dict[str, str] = {}
    for box in scene.boxes:
        found = {of_nodes.get(name, "") for name in (box.members if box.is_module else [box.name])}
        words[box.name] = found.pop() if len(found) == 1 else _SEVERAL
    kinds = sorted(set(words.values()) - {"", _SEVERAL}, key=_natural)
    cycle = {word: f"fx-c-{_CYCLE[i % len(_CYCLE)]}" for i, word in enumerate(kinds)}
    if column == "effect":
        cycle.update({word: f"fx-c-{_EFFECTS[word]}" for word in kinds if word in _EFFECTS})
    legend = [(cycle[word], word) for word in kinds[:_WORDS_SHOWN]]
    if len(kinds) > _WORDS_SHOWN:
        legend.append((_NO_WORD, f"and {len(kinds) - _WORDS_SHOWN:,} more"))
    rest = {_SEVERAL: "several", "": "in no region" if column == "region" else "none"}
    legend.extend((_NO_WORD, text) for word, text in rest.items() if word in words.values())
    classes = {name: cycle.get(word, _NO_WORD) for name, word in words.items()}
    notes = {name: word for name, word in words.items() if word in cycle}
    return Colouring(classes, notes, tuple(legend))


def _natural(word: str) -> list[tuple[int, str]]:
    """Order numbers in words by their value: `region_2` before `region_10`."""
    return [(int(p) if p.isdecimal() else -1, p) for p in re.split(r"(\d+)", word)]


def _dtype(detail: str) -> str:
    head = detail.partition("[")[0]
    return head if head and head.isalnum() and "[" in detail else ""
