"""States of one graph in one page, with a slider over them: the passes of a run, or two graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxkit.view.differences.union import Difference, Union
from fxkit.view.drawings.drawing import opened_groups
from fxkit.view.drawings.graph_data import as_json, graph_data
from fxkit.view.drawings.viewer import viewer_html
from fxkit.view.pages.page import fragment_page, notebook_bundle, write_file
from fxkit.view.pages.showing import show
from fxkit.view.texts.text_table import plural


@dataclass(frozen=True)
class TimelineStep:
    """One state of the graph.

    Attributes:
        title: What led to it; the name of a pass.
        graph_module: The graph.
        rules: The rules that fired, with how often.
        notes: What the pass did not do, and why.
        seconds: Time it took.
        diff: What is different from the state before; None for the first state.
    """

    title: str
    graph_module: fx.GraphModule
    rules: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    diff: Difference | None = None


@dataclass(frozen=True, repr=False)
class TimelineView:
    """What `timeline` returns: print it, save it, or let a notebook show it.

    Attributes:
        title: What it is called.
        steps: The states of the graph.
        max_nodes: How many boxes are shown at first, about.
    """

    title: str
    steps: tuple[TimelineStep, ...]
    max_nodes: int = 160

    def __str__(self) -> str:
        lines = [f"{self.title}: {plural(len(self.steps) - 1, 'step')}"]
        for i, step in enumerate(self.steps):
            nodes = plural(len(step.graph_module.graph.nodes), "node")
            fired = ", ".join(f"{rule} × {count}" for rule, count in step.rules.items())
            counts = step.diff.counts if step.diff is not None else {}
            told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            changed = told or ("no difference" if i else "")
            parts = "; ".join(part for part in (nodes, changed, fired) if part)
            lines.append(f"{i}  {step.title}: {parts}")
        return "\n".join(lines)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Return the states laid over each other: the schema of `graph_data`, with `steps`."""
        union = Union([step.graph_module for step in self.steps], self._diffs())
        data = graph_data(
            union,
            opened_groups(union.root, "auto", self.max_nodes),
            title=self.title,
            total=len(self.steps[-1].graph_module.graph.nodes),
        )
        columns = data["columns"]
        columns["born"] = [vertex.born for vertex in union.nodes]  # pyright: ignore
        columns["died"] = [vertex.died for vertex in union.nodes]  # pyright: ignore
        data["operand_lives"] = union.lives()
        data["steps"] = self._steps(union)
        return data

    def _diffs(self) -> list[Difference]:
        return [step.diff for step in self.steps if step.diff is not None]

    def _steps(self, union: Union) -> list[dict[str, Any]]:
        position: dict[Any, int] = {vertex: i for i, vertex in enumerate(union.nodes)}
        result = []
        for step, vertices in zip(self.steps, union.vertices, strict=True):
            changed = {}
            for name, words in _edited(step.diff).items():
                if name in vertices:
                    changed[position[vertices[name]]] = words
            told = {
                "title": step.title,
                "nodes": len(step.graph_module.graph.nodes),
                "rules": dict(step.rules),
                "notes": list(step.notes),
                "seconds": step.seconds,
                "changed": changed,
            }
            if step.diff is not None:
                told |= _counts(step.diff)
            result.append(told)
        return result

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON."""
        return as_json(self.to_dict(), indent=indent)

    def html(self) -> str:
        """Return one page with a slider over the states; it needs no network."""
        return fragment_page(self.title, self.html_fragment(), kind="fx-full")

    def html_fragment(self) -> str:
        """Return the viewer as HTML without a page around it."""
        return viewer_html(self.to_dict(), str(self).partition("\n")[0])

    def save(self, path: Any) -> Any:
        """Write the page to a file; returns its path."""
        return write_file(path, self.html())

    def show(self) -> None:
        """Show it below the cell in a notebook, in a browser elsewhere."""
        show(self, self.html)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return notebook_bundle(str(self), self.html(), 640)


def comparison(
    found: Difference, *, title: str = "difference", max_nodes: int = 160
) -> TimelineView:
    """Show two graphs side by side, everything at its place in both."""
    before, after = found.modules
    steps = (TimelineStep("before", before), TimelineStep("after", after, diff=found))
    return TimelineView(title, steps, max_nodes)


def _edited(found: Difference | None) -> dict[str, str]:
    """Return, by name after, what changed of the nodes that are the same."""
    if found is None:
        return {}
    kinds = [*found.of_kind("rewired"), *found.of_kind("changed")]
    return {change.after[0]: ", ".join(change.why) for change in kinds}


def _counts(found: Difference) -> dict[str, int]:
    counts = found.counts
    told = {kind: counts[kind] for kind in ("added", "removed", "replaced")}
    return {**told, "modified": len(_edited(found))}
