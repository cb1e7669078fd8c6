"""What a profile holds, and how it is shown: tables, bars, JSON, a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxkit.errors import UnsupportedError
from fxkit.view.pages.page import fragment_page, notebook_bundle, write_file
from fxkit.view.profiling.charts import Chart, memory_timeline, roofline
from fxkit.view.profiling.chrome_trace import trace_events
from fxkit.view.profiling.known_devices import device_name, find_device, known_peaks
from fxkit.view.profiling.peaks import Peaks, measure_peaks
from fxkit.view.profiling.profile_comparison import ProfileComparison, compare
from fxkit.view.profiling.profile_html import html_tables, signed
from fxkit.view.profiling.profile_rows import SORTS, Row, RowEntry, grouped, total
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.labels import clip, short_operator
from fxkit.view.texts.text_table import duration, percent, plural, quantity, table

VERSION = 2
"""Version of the dictionaries that `Profile.to_dict` returns."""

AGREED = 0.03
"""Nodes and whole calls agree where their times differ by no larger share of a call."""

REST = "the rest of a call (Python between the nodes, hooks, inputs and outputs, noise)"
"""What a table says of the time that has no row, so that its rows add up to a call."""

METRICS = ("time", "flops", "bytes", "memory")
GROUPINGS = ("node", "module", "op", "region")


@dataclass(frozen=True, repr=False)
class Profile:
    """What `profile` returns.

    Attributes:
        title: What was measured.
        rows: One for each node, in the order they run; inputs, constants and the output left out.
        end_to_end: Typical seconds of a call of the module itself, without timers: the mean over
            the calmer half of the runs.
        quartiles: First and third quartile of the seconds of such a call.
        instrumented: Typical seconds of a run with timers.
        peak_bytes: The most bytes of values that were alive at once, made by nodes: inputs and
            parameters are not counted, memory inside an operator is not seen.
        warmup: Runs that were not counted.
        iters: Runs, of whose calmer half means were taken.
        threads: Threads that torch used.
        peak_holders: The nodes that hold `peak_bytes`, with the bytes of each, most first.
        allocator_peak: The most bytes that torch's allocator handed out at once during a call,
            memory inside of operators included; None where it can't be told.
        device: Where the work was done.
        clock_seconds: Seconds that reading the clock costs a run with timers, measured by itself;
            taken off the nodes' times.
        node_count: Number of nodes in the graph, those without a row included.
        noise: Spread, in seconds, of what a call of the module takes more than the run with timers
            that came before it: smaller differences between the two mean nothing.
    """

    title: str
    rows: tuple[Row, ...]
    end_to_end: float | None
    quartiles: tuple[float, float] | None
    instrumented: float | None
    peak_bytes: int | None
    warmup: int
    iters: int
    threads: int
    peak_holders: tuple[tuple[str, int], ...] = ()
    allocator_peak: int | None = None
    device: str = "cpu"
    clock_seconds: float = 0.0
    noise: float = 0.0
    node_count: int = 0

    @property
    def node_seconds(self) -> float:
        """Sum of the nodes' times."""
        return sum(row.seconds or 0.0 for row in self.rows)

    @property
    def rest_seconds(self) -> float | None:
        """What a whole call takes beside its nodes, in seconds: with it the rows of a table add up
        to `end_to_end`. Negative where the runs with timers took longer; None without times.
        """
        return self.end_to_end - self.node_seconds if self.end_to_end is not None else None

    @property
    def outside_seconds(self) -> float:
        """Seconds of a call that no node accounts for: the module's own call, its hooks, taking
        inputs apart and putting outputs together; 0 when the nodes add up to more.
        """
        return max(0.0, (self.end_to_end or 0.0) - self.node_seconds)

    @property
    def disagreement(self) -> float:
        """Share of a call by which the sum of the nodes differs from it for no known reason.

        0 where they agree, or where calls take surely longer than the nodes: `outside_seconds` is
        then the time of Python between and around them.
        """
        whole = self.end_to_end or 0.0
        if not whole or any(row.is_reused for row in self.rows):
            return 0.0
        differ = self.node_seconds - whole
        is_sure = differ < 0 and self.noise <= AGREED * whole
        return 0.0 if is_sure or abs(differ) <= AGREED * whole else differ / whole

    @property
    def peak_with_workspace(self) -> int | None:
        """The most bytes of live values and of memory inside operators at once."""
        known = [
            (row.live_bytes or 0) + row.workspace_bytes
            for row in self.rows
            if row.workspace_bytes is not None
        ]
        return max(known, default=None)

    @property
    def overhead(self) -> float | None:
        """Seconds that the timers add to a run; about 0 within the noise of the measurement."""
        if self.instrumented is None or self.end_to_end is None:
            return None
        return self.instrumented - self.end_to_end

    @property
    def uncounted(self) -> tuple[Row, ...]:
        """The nodes without a FLOP formula, slowest first."""
        rows = [row for row in self.rows if row.flops is None]
        return tuple(sorted(rows, key=lambda row: -(row.seconds or 0.0)))

    def entries(self, *, sort_by: str = "time", group_by: str = "node") -> list[RowEntry]:
        """Return the lines of a table.

        Args:
            sort_by: `"time"`, `"flops"`, `"bytes"`, `"memory"`, or `"order"` as they run.
            group_by: `"node"`; `"op"`, by operator; `"module"`, by module, numbers in paths
                taken as one, so that the layers of a stack are added up; `"region"`, by the
                compiled kernel's region.

        Raises:
            UnsupportedError: One of them is none of these.
        """
        if sort_by not in SORTS or group_by not in GROUPINGS:
            raise UnsupportedError(
                f"expected sort_by out of {', '.join(SORTS)} and group_by out of "
                f"{', '.join(GROUPINGS)}, got {sort_by!r} and {group_by!r}"
            )
        return sorted(grouped(self.rows, group_by), key=SORTS[sort_by])

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
        entries = self.entries(sort_by=sort_by, group_by=group_by)
        shown = entries if limit is None else entries[:limit]
        title = "operator" if group_by == "op" else group_by
        headers = [title, "operator", "output", "nodes", "time", "share", "FLOP", "FLOP/s", "bytes"]
        headers += ["live", "inside"]
        rows = [self._cells(entry) for entry in shown]
        dropped = {"node": [3], "region": [2]}.get(group_by, [1, 2])
        if group_by != "node" or self.peak_bytes is None:
            dropped = [*dropped, 9, 10]
        keep = [i for i in range(len(headers)) if i not in dropped]
        return (
            [headers[i] for i in keep],
            [[row[i] for i in keep] for row in rows],
            "".join("<<<>>>>>>>>"[i] for i in keep),
            [
                f"{words}, {self._time_and_share(seconds)}"
                for words, seconds in self.without_row(entries[len(shown) :])
            ],
        )

    def without_row(self, left: Sequence[RowEntry]) -> list[tuple[str, float | None]]:
        """Return what a table has no rows for, in words and seconds: with it, rows add up."""
        found: list[tuple[str, float | None]] = []
        if left:
            found.append((f"… {len(left):,} more", total([entry.seconds for entry in left])))
        if self.rest_seconds is not None:
            found.append((REST, self.rest_seconds))
        return found

    def _time_and_share(self, seconds: float | None) -> str:
        return f"{signed(seconds)} ({self.share(seconds)})"

    def share(self, seconds: float | None) -> str:
        """Return which share of a call some seconds are, as text."""
        share = percent(seconds or 0.0, self.end_to_end or self.node_seconds)
        return share.replace("-", "−")

    def summary(self) -> list[str]:
        """Return what matters of the whole, as lines of text."""
        lines = [
            f"{self.title}: {plural(self.node_count, 'node')}, of which {len(self.rows):,} "
            f"compute; {plural(self.threads, 'thread')}"
        ]
        if self.end_to_end is not None:
            share = percent(self.node_seconds, self.end_to_end)
            lines[0] += f", {plural(self.iters, 'run')} after {self.warmup} to warm up"
            lines.append(
                f"end-to-end {duration(self.end_to_end)}; sum of nodes "
                f"{duration(self.node_seconds)} ({share}); timers add {self._overhead_text()}"
            )
            lines.extend([*self._outside(), *self._disagreeing(), *self._unsteady()])
        known = [row.flops for row in self.rows if row.flops is not None]
        if known or any(row.bytes is not None for row in self.uncounted):
            lines.append(self._flop_line(sum(known) if known else None))
        lines.extend(self._memory_lines())
        return [*lines, *self._marks()]

    def _memory_lines(self) -> list[str]:
        """Say who holds the peak of live values, and what operators take besides."""
        if self.peak_bytes is None:
            return []
        where = max(self.rows, key=lambda row: row.live_bytes or 0, default=None)
        at = f", while %{where.name} runs" if where else ""
        held = [f"%{name} {quantity(size, 'B')}" for name, size in self.peak_holders[:4]]
        more = len(self.peak_holders) - len(held)
        by = f": {', '.join(held)}{f' and {more} more' if more else ''}" if held else ""
        lines = [f"peak of live values {quantity(self.peak_bytes, 'B')}{at}{by}"]
        inside = self.peak_with_workspace
        if self.allocator_peak is None or inside is None:
            return lines
        top = max(self.rows, key=lambda row: (row.live_bytes or 0) + (row.workspace_bytes or 0))
        parts = f"{quantity(top.live_bytes, 'B')} live and {quantity(top.workspace_bytes, 'B')}"
        lines.append(
            f"peak with what operators take inside {quantity(inside, 'B')}: {parts} inside of "
            f"%{top.name}; torch's allocator {quantity(self.allocator_peak, 'B')}"
        )
        return lines

    def _marks(self) -> list[str]:
        reused = sum(row.is_reused for row in self.rows)
        bound = sum(row.is_launch_bound for row in self.rows)
        lines = []
        if reused:
            measured = len(self.rows) - reused
            lines.append(
                f"{plural(measured, 'node')} measured; times marked * are the baseline's: {reused}"
            )
        if bound:
            lines.append(f"times marked ! are bound by their launch: {plural(bound, 'node')}")
        return lines

    @property
    def is_steady(self) -> bool:
        """Whether the middle half of the runs took about the same time."""
        low, high = self.quartiles or (0.0, 0.0)
        return high <= 1.3 * low

    def _unsteady(self) -> list[str]:
        low, high = self.quartiles or (0.0, 0.0)
        if self.is_steady:
            return []
        return [
            f"unsteady: half of the runs took between {duration(low)} and {duration(high)}; is "
            "something else running on this machine?"
        ]

    @property
    def _noise(self) -> float:
        """Seconds by which calls differ: less than that is no finding."""
        low, high = self.quartiles or (0.0, 0.0)
        return max(self.noise, high - low)

    def _outside(self) -> list[str]:
        """Say how much of a call is no node's, where that is more than a tenth of it."""
        outside, whole = self.outside_seconds, self.end_to_end or 0.0
        if outside <= max(0.1 * whole, self._noise) or not self.is_steady:
            return []
        return [
            f"outside of nodes {duration(outside)} ({percent(outside, whole)}): Python between "
            "them, the call of the module itself, its hooks, inputs and outputs"
        ]

    def _disagreeing(self) -> list[str]:
        if not self.disagreement:
            return []
        more = "more" if self.disagreement > 0 else "less"
        return [
            f"after {plural(self.iters, 'run')} the nodes take "
            f"{percent(abs(self.disagreement), 1.0)} {more} than a call, and no steady difference "
            "says why: is something else running on this machine?"
        ]

    def _overhead_text(self) -> str:
        added = self.overhead or 0.0
        if added <= max(self.clock_seconds, self._noise) or not self.is_steady:
            added = self.clock_seconds
        if added <= 0.0:
            return "less than the noise of the measurement"
        return f"{duration(added)} ({percent(added, self.end_to_end or 0.0)})"

    def _flop_line(self, total: int | None) -> str:
        line = quantity(total, "FLOP") if total is not None else "no FLOPs known"
        if total is not None and self.end_to_end:
            line += f", {quantity(total / self.end_to_end, 'FLOP/s')}"
        if not self.uncounted:
            return line
        share = self.share(sum(row.seconds or 0.0 for row in self.uncounted))
        names = list(dict.fromkeys(short_operator(row.operator) for row in self.uncounted))
        listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        count = plural(len(self.uncounted), "node")
        return f"{line}; {count} not counted, {share} of the time: {listed}"

    def _cells(self, entry: RowEntry) -> list[str]:
        rate = entry.flops / entry.seconds if entry.flops and entry.seconds else None
        mark = "+?" if entry.uncounted and entry.flops is not None else ""
        return [
            clip(entry.key, 48),
            clip(" + ".join(entry.computes) or entry.operator, 34),
            clip(entry.type, 28),
            str(entry.nodes),
            f"{duration(entry.seconds)}{_signs(entry)}",
            self.share(entry.seconds),
            quantity(entry.flops) + mark,
            quantity(rate) if rate else "",
            quantity(entry.bytes),
            quantity(entry.live_bytes),
            quantity(entry.workspace_bytes),
        ]

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


def _signs(entry: RowEntry) -> str:
    return ("*" if entry.reused else "") + ("!" if entry.launch_bound else "")
