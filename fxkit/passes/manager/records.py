"""What a run of a pass manager did: one record a pass."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from fxkit.ir.journal import GraphChange
from fxkit.ir.text_table import aligned
from fxkit.passes.analyses import AnalysisTally
from fxkit.passes.manager.history import Timeline
from fxkit.passes.manager.tracking import Rewrite
from fxkit.passes.subjects import export_again
from fxkit.patterns.rewrite_report import Tally


@dataclass(frozen=True)
class PassRecord:
    """What one pass did.

    Attributes:
        name: Name of the pass, with the options that are not default.
        place: Where it stands in the list, as `name (3/7)`.
        seconds: Time it took, its verification left out.
        verify_seconds: Time its verification took.
        nodes_before: Number of nodes before it.
        nodes_after: Number of nodes after it.
        changes: The journal of its edits.
        rewrites: Rewrites by rule.
        rules: Rule → tries, hits, refusals and seconds.
        sites: Each application of a rule and each replacement, in order.
        notes: What it did not do, and why.
        scheduled_for: The pass whose requirement it was run for; None for one of the list.
    """

    name: str
    place: str
    seconds: float
    verify_seconds: float
    nodes_before: int
    nodes_after: int
    changes: Sequence[GraphChange] = ()
    rewrites: Counter[str] = field(default_factory=Counter)
    rules: Mapping[str, Tally] = field(default_factory=dict)
    sites: tuple[Rewrite, ...] = ()
    notes: tuple[str, ...] = ()
    scheduled_for: str | None = None

    @property
    def modified(self) -> bool:
        """Whether it changed anything."""
        return bool(self.changes)


@dataclass(frozen=True)
class PassResult:
    """What a run of a pass manager did.

    Attributes:
        graph_module: The module, changed in place.
        records: One record for each time that a pass ran, in order.
        timeline: The graph as it was before the first pass and after each.
        analyses: Analysis → how often it was computed, and the seconds that took.
        program: What the manager was given.
        stopped: Why the run ended before the last pass, or None.
    """

    graph_module: fx.GraphModule
    records: tuple[PassRecord, ...]
    timeline: Timeline
    analyses: Mapping[str, AnalysisTally]
    program: Any = None
    stopped: str | None = None

    @property
    def modified(self) -> bool:
        """Whether any pass changed anything."""
        return any(record.modified for record in self.records)

    @property
    def sites(self) -> tuple[Rewrite, ...]:
        """Every application of a rule and every replacement of the run, in order."""
        return tuple(site for record in self.records for site in record.sites)

    def exported_program(self) -> Any:
        """Return the module as an `ExportedProgram`, when the manager was given one.

        Raises:
            PassError: When it was given something else.
            UnsupportedError: When the program has no example inputs.
        """
        return export_again(self.graph_module, self.program)

    def table(self) -> str:
        """Return the passes with time, nodes before and after, and rules hit, as text."""
        rows = [("pass", "ms", "verify ms", "nodes", "", "rules hit")]
        for record in self.records:
            hits = ", ".join(f"{n} {rule}" for rule, n in record.rewrites.most_common())
            edits = f"{len(record.changes)} edits" if record.modified else "no change"
            asked = f" for {record.scheduled_for}" if record.scheduled_for else ""
            rows.append(
                (
                    record.name + asked,
                    _ms(record.seconds),
                    _ms(record.verify_seconds),
                    f"{record.nodes_before} -> {record.nodes_after}",
                    edits,
                    hits,
                )
            )
        lines = aligned(rows, align="<>>><<")
        return "\n".join(lines if self.stopped is None else [*lines, f"stopped: {self.stopped}"])

    def timings(self) -> str:
        """Return where the time went: passes, their rules, and analyses, as text."""
        rows = [("", "times", "ms")]
        for record in self.records:
            rows.append((record.name, "1", _ms(record.seconds)))
            used = [(name, tally) for name, tally in record.rules.items() if tally.hits]
            for name, tally in sorted(used, key=lambda item: -item[1].seconds):
                rows.append((f"  rule {name}", str(tally.hits), _ms(tally.seconds)))
        for name, tally in self.analyses.items():
            rows.append((f"analysis {name}", str(tally.made + tally.updated), _ms(tally.seconds)))
        return "\n".join(aligned(rows, align="<>>"))

    def diff(self) -> str:
        """Return every change, pass by pass, as text."""
        parts = []
        for record in self.records:
            if record.modified:
                parts.append(f"{record.name}:")
                parts.extend(f"  {change}" for change in record.changes)
        return "\n".join(parts)

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write one offline HTML file: each pass, and the graph before and after it.

        Args:
            path: The file to write.
            options: What `fxkit.report` takes besides: `title`.

        Returns:
            The path.
        """
        # Views stand above passes, so that the page is asked of the package by name.
        return sys.modules["fxkit"].report(self, path, **options)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return self.table()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
