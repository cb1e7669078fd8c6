"""One HTML file that tells what went in, what each pass did, and where the time goes.

A report is a value: each `add_...` returns a new one with one more section. Nothing is fetched from
anywhere, so that the file can be sent, kept and opened offline.

    from fxkit.view.reports.report_page import Report

    Report("MiniLM through fxkit", lead="38 sentences, two threads")
        .add_summary({"nodes captured": 183, "eager": "12.1 ms", "fxkit": "9.8 ms"})
        .add_environment({"CPU": "Xeon, 2 cores"})
        .add_tree(gm)
        .add_graph(gm)
        .add_passes(result)
        .add_diff(before, after)
        .add_regions(compiled.regions)
        .add_source("kernels", compiled.source, language="cpp")
        .add_profile(profile_before, profile_after)
        .add_errors({"eager": 1.1e-7, "fxkit": 0.9e-7})
        .add_table("Nearest neighbours", ["sentence", "nearest", "cosine"], rows)
        .save("report.html")
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxkit.view.differences.diffing import GraphDiff
from fxkit.view.differences.diffing import diff as compare
from fxkit.view.differences.pass_timeline import timeline
from fxkit.view.drawings.drawing import draw
from fxkit.view.drawings.module_tree import tree
from fxkit.view.pages.highlighting import highlight
from fxkit.view.pages.page import fragment_page, notebook_bundle, write_file
from fxkit.view.profiling.profile_result import Profile
from fxkit.view.reports import report_parts
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.text_table import plural


@dataclass(frozen=True)
class Section:
    """One part of a report.

    Attributes:
        title: What it is called, in the page and in the list on its left.
        lead: A sentence that says what is seen.
        html: Its contents, escaped.
    """

    title: str
    lead: str
    html: str


@dataclass(frozen=True)
class Report:
    """A report under construction; `save` writes it.

    Attributes:
        title: Its heading.
        lead: A line under the heading.
        sections: What it holds, in order.
    """

    title: str
    lead: str = ""
    sections: tuple[Section, ...] = ()

    def add(self, title: str, html: str, lead: str = "") -> Report:
        """Add a section of HTML that is already escaped."""
        return replace(self, sections=(*self.sections, Section(title, lead, html)))

    def add_summary(self, facts: Mapping[str, object], *, lead: str = "") -> Report:
        """Add the few facts that matter most, large."""
        return self.add("Summary", report_parts.tiles(facts), lead)

    def add_environment(self, facts: Mapping[str, object] | None = None) -> Report:
        """Add versions and the machine, with `facts` behind them."""
        known = {
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
            **(facts or {}),
        }
        html = report_parts.table(["", ""], known.items(), sortable=False)
        return self.add("Environment", html, "What all figures here were measured with.")

    def add_tree(self, gm: fx.GraphModule, *, title: str = "Modules") -> Report:
        """Add the module tree; its parts open and close."""
        lead = "The program as its modules nest; each line shows operator, output and source line."
        return self.add(title, tree(gm).html_fragment(), lead)

    def add_graph(self, gm: fx.GraphModule, *, title: str = "Graph", **options: Any) -> Report:
        """Add a drawing to move, zoom and search in; options are those of `draw`."""
        view = draw(gm, **options)
        fetched = sum(node.op == "get_attr" for node in gm.graph.nodes)
        more = f", of which {fetched:,} fetch parameters and constants" if fetched else ""
        lead = (
            f"{plural(view.nodes, 'node')}{more}; from inputs at the top to outputs at the bottom. "
            "Layers that are alike are drawn once. Drag to move; click, then turn the "
            "wheel to zoom; / searches."
        )
        return self.add(title, view.html_fragment(), lead)

    def add_passes(self, result: Any, *, title: str = "Passes") -> Report:
        """Add what each pass did.

        Args:
            result: Records with `name`, `seconds`, `nodes_before`, `nodes_after` and `rewrites`
                (rule → count), or something that holds them in `.records` or `.passes`.
            title: Of the section.
        """
        records = list(_records(result))
        changed = sum(record.nodes_before - record.nodes_after for record in records)
        lead = (
            f"{plural(len(records), 'pass').replace('passs', 'passes')} ran in this order and took "
            f"{changed:,} nodes away. Each row tells which rules fired, and how often."
        )
        return self.add(title, report_parts.passes(records), lead)

    def add_timeline(self, result: Any, *, title: str = "Pass by pass") -> Report:
        """Add the graph with a slider over the passes of a `PassResult`."""
        shown = timeline(result)
        lead = (
            "The graph before and after each pass that changed it, everything at its place in "
            "both: removed nodes are framed in red, added ones in green, changed ones in amber. "
            "The slider goes through the passes."
        )
        if len(shown.steps) < 2:
            return self.add(title, "<p>No pass changed anything.</p>")
        return self.add(title, shown.html_fragment(), lead)

    def add_charts(self, measured: Profile, *, title: str = "Limits and memory") -> Report:
        """Add how near nodes come to what the device can do, and the memory that is live."""
        lead = (
            "Left of the bend of the line a node can't be faster than memory allows, right of it "
            "not faster than arithmetic. Below: bytes of values that are alive as each node runs."
        )
        charts = [measured.roofline()]
        if measured.peak_bytes is not None:
            charts.append(measured.memory_timeline())
        html = "".join(f'<div class="fx-scroll">{chart}</div>' for chart in charts)
        return self.add(title, html, lead)

    def add_diff(
        self, before: fx.GraphModule | GraphDiff, after: fx.GraphModule | None = None
    ) -> Report:
        """Add what is different between two graphs, or a difference that is there already."""
        found = before if isinstance(before, GraphDiff) else compare(before, after or before)
        lead = "Every node that is not as it was, with the rule or pass that recorded the change."
        html = (
            f'<details class="fx-fold"><summary>{escape(found.summary())}</summary>'
            '<div class="fx-scroll" style="padding:8px 16px">'
            f"{found.html_fragment()}</div></details>"
        )
        return self.add("Changes", html, lead)

    def add_regions(
        self,
        regions: Iterable[Any],
        kernels: Mapping[str, Any] | None = None,
        *,
        title: str = "Fused regions",
    ) -> Report:
        """Add the regions: those that became kernels, and why the others did not.

        Args:
            regions: Those of a compiled module.
            kernels: Its kernels by name, to say which are products, attention or rows.
            title: Heading of the section.
        """
        lead = (
            "A region is a group of nodes that one kernel computes, so that what lies between them "
            "never goes through memory. What is not fused runs in torch's own kernels (ATen), for "
            "the reason given."
        )
        return self.add(title, report_parts.regions(list(regions), kernels), lead)

    def add_source(
        self, name: str, text: str | Mapping[str, str], *, language: str = "cpp"
    ) -> Report:
        """Add generated source, closed at first.

        Args:
            name: What it is.
            text: The text, or several texts by name.
            language: `"cpp"` or `"python"`.
        """
        texts = {name: text} if isinstance(text, str) else text
        html = "".join(
            f'<details class="fx-fold"><summary>{escape(part)} '
            f'<span class="fx-muted">{plural(code.count(chr(10)) + 1, "line")}</span></summary>'
            f'<pre class="fx-code">{highlight(code, language)}</pre></details>'
            for part, code in texts.items()
        )
        return self.add("Generated code", html, "What fxkit wrote and compiled.")

    def add_profile(
        self,
        before: Profile,
        after: Profile | None = None,
        *,
        names: tuple[str, str] = ("eager", "fxkit"),
        seconds: tuple[float, float] | None = None,
    ) -> Report:
        """Add where the time goes, before and, if it is given, after.

        Args:
            before: Profile of the program as it was.
            after: Profile of what became of it, such as a compiled module.
            names: What the two are called.
            seconds: Median times of whole calls that were measured in turn, to be shown in place
                of the profiles' own, which were measured one after the other.
        """
        lead = "Measured between the statements of generated code, of the calmer half of runs."
        if after is not None:
            lead = (
                f"The same inputs through {names[0]} and {names[1]}, the longest first: each line "
                f"is the same work on both sides. {lead}"
            )
        return self.add(
            "Where the time goes", report_parts.profiles(before, after, names, seconds), lead
        )

    def add_errors(
        self, values: Mapping[str, float], *, reference: str = "float64", note: str = ""
    ) -> Report:
        """Add errors against a reference; the first one is what the others are compared with."""
        lead = note or "The largest difference, relative to the largest value."
        return self.add("Numerical errors", report_parts.errors(values, reference), lead)

    def add_table(
        self, title: str, headers: Sequence[str], rows: Iterable[Sequence[object]], lead: str = ""
    ) -> Report:
        """Add any table; columns of numbers stand to the right, and a click on a title sorts."""
        return self.add(title, report_parts.table(headers, rows), lead)

    def html(self) -> str:
        """Return the whole file as text."""
        anchors = _anchors([section.title for section in self.sections])
        links = "".join(
            f'<a href="#{anchor}">{escape(section.title)}</a>'
            for anchor, section in zip(anchors, self.sections, strict=True)
        )
        body = "".join(
            f'<section id="{anchor}"><h2>{escape(section.title)}</h2>'
            + (f'<p class="fx-lead">{escape(section.lead)}</p>' if section.lead else "")
            + f"{section.html}</section>"
            for anchor, section in zip(anchors, self.sections, strict=True)
        )
        lead = f"<p>{escape(self.lead)}</p>" if self.lead else ""
        return fragment_page(
            self.title,
            f'<div class="fx-report"><nav aria-label="sections">{links}'
            "<button data-theme-switch>light / dark</button></nav>"
            f"<main><header><h1>{escape(self.title)}</h1>{lead}</header>{body}</main></div>",
            kind="fx-whole",
        )

    def save(self, path: str | Path) -> Path:
        """Write the report; returns the path."""
        return write_file(path, self.html())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        titles = ", ".join(section.title for section in self.sections)
        return notebook_bundle(f"{self.title}: {titles}", self.html(), 720)


def _records(result: Any) -> Iterable[Any]:
    for name in ("records", "passes"):
        if hasattr(result, name):
            return getattr(result, name)
    return result


def _anchors(titles: Sequence[str]) -> list[str]:
    """Make a link target of each title; equal ones get a number."""
    seen: dict[str, int] = {}
    anchors = []
    for title in titles:
        base = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        seen[base] = seen.get(base, 0) + 1
        anchors.append(base if seen[base] == 1 else f"{base}-{seen[base]}")
    return anchors
