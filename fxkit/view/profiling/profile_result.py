"""What a profile holds, and how it is shown: tables, bars, JSON, a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxkit.errors import UnsupportedError
from fxkit.view.pages.page import fragment_page, notebook_bundle, write_file
from fxkit.view.profiling import profile_text
from fxkit.view.profiling.charts import Chart, memory_timeline, roofline
from fxkit.view.profiling.chrome_trace import trace_events
from fxkit.view.profiling.known_devices import device_name, find_device, known_peaks
from fxkit.view.profiling.peaks import Peaks, measure_peaks
from fxkit.view.profiling.profile_comparison import ProfileComparison, compare
from fxkit.view.profiling.profile_html import html_tables
from fxkit.view.profiling.profile_numbers import GROUPINGS, ProfileNumbers
from fxkit.view.profiling.profile_rows import Row
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.text_table import table

VERSION = 2
"""Version of the dictionaries that `Profile.to_dict` returns."""

METRICS = ("time", "flops", "bytes", "memory")


@dataclass(frozen=True, repr=False)
class Profile(ProfileNumbers):
    """What `profile` returns: what was measured, and how it is shown; see `ProfileNumbers`."""

    def table(
        self, *, sort_by: str = "time", group_by: str = "node", limit: int | None = 30
    ) -> str:
        """Return a text table under a summary; `limit` lines, what is left out is counted."""
        headers, rows, align, rest = self.cells(sort_by=sort_by, group_by=group_by, limit=limit)
        body = table(headers, rows, align=align)
        return "\n".join([*self.summary(), "", body, *rest])

    def cells(
        self, *, sort_by: str = "time", group_by: str = "node", limit: int | None = 30
    ) -> tuple[list[str], list[list[str]], str, list[str]]:
        """Return the table's titles, its cells, their alignment, and lines for what has no row."""
        return profile_text.cells(
            self, self.entries(sort_by=sort_by, group_by=group_by), group_by, limit
        )

    def summary(self) -> list[str]:
        """Return what matters of the whole, as lines of text."""
        return profile_text.summary(self)

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, with a `version` on top."""
        return {
            "version": VERSION,
            "title": self.title,
            "end_to_end": self.end_to_end,
            "quartiles": self.quartiles,
            "sum_of_nodes": self.node_seconds,
            "instrumented": self.instrumented,
            "overhead": self.overhead,
            "clock_seconds": self.clock_seconds,
            "noise": self.noise,
            "node_count": self.node_count,
            "disagreement": self.disagreement,
            "outside_of_nodes": self.outside_seconds,
            "peak_bytes": self.peak_bytes,
            "warmup": self.warmup,
            "iters": self.iters,
            "threads": self.threads,
            "device": self.device,
            "peak_holders": [list(holder) for holder in self.peak_holders],
            "allocator_peak": self.allocator_peak,
            "peak_with_workspace": self.peak_with_workspace,
            "nodes": [asdict(row) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Return the profile that `to_dict` described.

        Raises:
            UnsupportedError: The values are something else, or of another version.
        """
        if values.get("version") != VERSION or "nodes" not in values:
            raise UnsupportedError(
                f"expected a profile of version {VERSION}, got version {values.get('version')}",
                hint="measure it again with this version of fxkit",
            )
        rows = [Row(**{**row, "computes": tuple(row["computes"])}) for row in values["nodes"]]
        quartiles = values["quartiles"]
        names = ("title", "end_to_end", "instrumented", "peak_bytes", "warmup", "iters", "threads")
        return cls(
            **{name: values[name] for name in names},
            rows=tuple(rows),
            quartiles=tuple(quartiles) if quartiles is not None else None,
            peak_holders=tuple((name, size) for name, size in values["peak_holders"]),
            allocator_peak=values["allocator_peak"],
            device=values["device"],
            clock_seconds=values.get("clock_seconds", 0.0),
            noise=values.get("noise", 0.0),
            node_count=values.get("node_count", len(rows)),
        )

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def html(self) -> str:
        """Return one self-contained page."""
        title = f"Profile of {self.title}"
        return fragment_page(title, f"<h1>{escape(title)}</h1>{self.html_fragment()}")

    def html_fragment(self, *, limit: int = 20) -> str:
        """Return the summary and three tables with bars, without a page around them.

        The rows of each table add up to a whole call.
        """
        return html_tables(self, limit)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return notebook_bundle(str(self), self.html())

    def export_chrome_trace(self, path: str | Path) -> Path:
        """Write a trace that Perfetto and `chrome://tracing` open: nodes, modules, live memory.

        Each node has its typical time; they are put one after another.
        """
        events = list(trace_events(self.rows))
        return write_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def compare(self, other: Profile, *, group_by: str = "op") -> ProfileComparison:
        """Set this profile, the one before, beside another one, the one after."""
        if group_by not in GROUPINGS:
            raise UnsupportedError(
                f"expected group_by out of {', '.join(GROUPINGS)}, got {group_by!r}"
            )
        return compare(self, other, group_by)

    def roofline(self, peaks: Peaks | str | None = None) -> Chart:
        """Return a chart of how near each node comes to what the device can do.

        Args:
            peaks: What the device can do; the name of a device, such as `"H100"`, for what its data
                sheet says in float32. When left out it is measured here, in a fraction of a second,
                and the data sheet of the device is drawn beside it where the table has it.
        """
        if peaks is not None:
            roofs = known_peaks(peaks) if isinstance(peaks, str) else peaks
            return roofline(self.rows, roofs, self.title)
        known = find_device(device_name(self.device))
        sheet = known_peaks(known.name) if known is not None else None
        return roofline(self.rows, measure_peaks(self.device), self.title, beside=sheet)

    def memory_timeline(self) -> Chart:
        """Return a chart of the bytes that are live while each node runs."""
        return memory_timeline(self.rows, self.peak_bytes or 0, self.peak_holders, self.title)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary a node, with arithmetic intensity and share of a call."""
        whole = self.end_to_end or self.node_seconds
        return [
            {
                **asdict(row),
                "computes": " ".join(row.computes),
                "intensity": row.intensity,
                "share": (row.seconds or 0.0) / whole if whole else None,
            }
            for row in self.rows
        ]

    def to_pandas(self) -> Any:
        """Return `to_rows()` as a pandas DataFrame.

        Raises:
            UnsupportedError: pandas isn't installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UnsupportedError(
                "expected pandas to be installed, got no such module",
                hint="pip install pandas, or take to_rows(), which needs nothing",
            ) from error
        return pandas.DataFrame(self.to_rows())
