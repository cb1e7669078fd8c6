"""What a profile holds, and how it is shown: tables, bars, JSON, a trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxkit.errors import UnsupportedError
from fxkit.view.labels import clip, short_operator
from fxkit.view.page import escape, fragment_page, notebook_bundle
from fxkit.view.text_table import duration, percent, plural, quantity, table

VERSION = 1
"""Version of the dictionaries that `Profile.to_dict` returns."""

METRICS = ("time", "flops", "bytes", "memory")
GROUPINGS = ("node", "module", "op")

_SORTS: dict[str, Callable[[Entry], float]] = {
    "time": lambda entry: -(entry.seconds or 0.0),
    "flops": lambda entry: -(entry.flops or 0),
    "bytes": lambda entry: -(entry.bytes or 0),
    "memory": lambda entry: -(entry.live_bytes or 0),
    "order": lambda entry: 0.0,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One node.

    Attributes:
        name: The node's name.
        operator: Identity of its operator.
        module: Path of the module it ran in.
        type: Shape and dtype of its value.
        family: One of `fxkit.view.labels.FAMILIES`.
        source: The user's line.
        seconds: Median time.
        low: First quartile of the time.
        high: Third quartile of the time.
        flops: Floating point operations; None when there is no formula for them.
        bytes: Bytes that have to be read and written at least; None when not known.
        live_bytes: Bytes of values, made by nodes, that are alive while it runs.
        computes: For a kernel the names of the nodes that it computes.
    """

    name: str
    operator: str
    module: str
    type: str
    family: str
    source: str
    seconds: float | None
    low: float | None
    high: float | None
    flops: int | None
    bytes: int | None
    live_bytes: int | None
    computes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table: a node, or all nodes of a module or an operator.

    Attributes:
        key: Name of the node, module or operator.
        operator: Identity of the operator, where there is one.
        type: Shape and dtype, for a node.
        nodes: How many nodes it stands for.
        seconds: Sum of their medians; None when time was not measured.
        flops: Sum of what is known; None when nothing is.
        uncounted: How many of its nodes have no FLOP formula.
        bytes: Sum of what is known; None when nothing is.
        live_bytes: Largest of theirs.
        computes: For a kernel the names of the nodes that it computes.
    """

    key: str
    operator: str
    type: str
    nodes: int
    seconds: float | None
    flops: int | None
    uncounted: int
    bytes: int | None
    live_bytes: int | None
    computes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Profile:
    """What `profile` returns.

    Attributes:
        title: What was measured.
        rows: One for each node, in the order they run; inputs, constants and the output left out.
        end_to_end: Median seconds of a call of the module itself, without timers.
        quartiles: First and third quartile of the seconds of such a call.
        instrumented: Median seconds of a run with timers.
        peak_bytes: The most bytes of values that were alive at once, made by nodes: inputs and
            parameters are not counted, memory inside an operator is not seen.
        warmup: Runs that were not counted.
        iters: Runs that medians were taken of.
        threads: Threads that torch used.
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

    @property
    def node_seconds(self) -> float:
        """Sum of the nodes' median times."""
        return sum(row.seconds or 0.0 for row in self.rows)

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

    def entries(self, *, sort_by: str = "time", group_by: str = "node") -> list[Entry]:
        """Return the lines of a table.

        Args:
            sort_by: `"time"`, `"flops"`, `"bytes"`, `"memory"`, or `"order"` as they run.
            group_by: `"node"`; `"op"`, by operator; `"module"`, by module, numbers in paths
                taken as one, so that the layers of a stack are added up.

        Raises:
            UnsupportedError: One of them is none of these.
        """
        if sort_by not in _SORTS or group_by not in GROUPINGS:
            raise UnsupportedError(
                f"expected sort_by out of {', '.join(_SORTS)} and group_by out of "
                f"{', '.join(GROUPINGS)}, got {sort_by!r} and {group_by!r}"
            )
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(_key(row, group_by), []).append(row)
        return sorted((_entry(key, rows) for key, rows in groups.items()), key=_SORTS[sort_by])

    def table(
        self, *, sort_by: str = "time", group_by: str = "node", limit: int | None = 30
    ) -> str:
        """Return a text table under a summary; `limit` lines, what is left out is counted."""
        entries = self.entries(sort_by=sort_by, group_by=group_by)
        shown = entries if limit is None else entries[:limit]
        title = {"node": "node", "module": "module", "op": "operator"}[group_by]
        headers = [title, "operator", "output", "nodes", "time", "share", "FLOP", "FLOP/s", "bytes"]
        rows = [self._cells(entry) for entry in shown]
        dropped = {"node": [3], "module": [1, 2], "op": [1, 2]}[group_by]
        keep = [i for i in range(len(headers)) if i not in dropped]
        body = table(
            [headers[i] for i in keep],
            [[row[i] for i in keep] for row in rows],
            align="".join("<<<>>>>>>"[i] for i in keep),
        )
        lines = [*self.summary(), "", body]
        if len(shown) < len(entries):
            rest = sum(entry.seconds or 0.0 for entry in entries[len(shown) :])
            lines.append(f"… {len(entries) - len(shown)} more, {duration(rest)} in all")
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """Return what matters of the whole, as lines of text."""
        lines = [
            f"{self.title}: {plural(len(self.rows), 'node')}, {plural(self.threads, 'thread')}"
        ]
        if self.end_to_end is not None:
            share = percent(self.node_seconds, self.end_to_end)
            lines[0] += f", median of {self.iters} runs after {self.warmup} to warm up"
            lines.append(
                f"end-to-end {duration(self.end_to_end)}; sum of nodes "
                f"{duration(self.node_seconds)} ({share}); timers add {self._overhead_text()}"
            )
            lines.extend(self._unsteady())
        known = [row.flops for row in self.rows if row.flops is not None]
        if known:
            lines.append(self._flop_line(sum(known)))
        if self.peak_bytes is not None:
            where = max(self.rows, key=lambda row: row.live_bytes or 0, default=None)
            at = f", while %{where.name} runs" if where else ""
            lines.append(f"peak of live values {quantity(self.peak_bytes, 'B')}{at}")
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

    def _overhead_text(self) -> str:
        added = self.overhead or 0.0
        if added <= 0.0:
            return "less than the noise of the measurement"
        return f"{duration(added)} ({percent(added, self.end_to_end or 0.0)})"

    def _flop_line(self, total: int) -> str:
        rate = f", {quantity(total / self.end_to_end, 'FLOP/s')}" if self.end_to_end else ""
        line = f"{quantity(total, 'FLOP')}{rate}"
        if not self.uncounted:
            return line
        share = percent(sum(row.seconds or 0.0 for row in self.uncounted), self.node_seconds)
        names = list(dict.fromkeys(short_operator(row.operator) for row in self.uncounted))
        listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        count = plural(len(self.uncounted), "node")
        return f"{line}; {count} not counted, {share} of the time: {listed}"

    def _cells(self, entry: Entry) -> list[str]:
        rate = entry.flops / entry.seconds if entry.flops and entry.seconds else None
        mark = "+?" if entry.uncounted and entry.flops is not None else ""
        return [
            clip(entry.key, 48),
            clip(" + ".join(entry.computes) or entry.operator, 34),
            clip(entry.type, 28),
            str(entry.nodes),
            duration(entry.seconds),
            percent(entry.seconds or 0.0, self.node_seconds),
            quantity(entry.flops) + mark,
            quantity(rate) if rate else "",
            quantity(entry.bytes),
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
            "peak_bytes": self.peak_bytes,
            "warmup": self.warmup,
            "iters": self.iters,
            "threads": self.threads,
            "nodes": [asdict(row) for row in self.rows],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def html(self) -> str:
        """Return one self-contained page."""
        return fragment_page(f"profile of {self.title}", self.html_fragment())

    def html_fragment(self, *, limit: int = 20) -> str:
        """Return the summary and three tables with bars, without a page around them."""
        head = "".join(f"<li>{escape(line)}</li>" for line in self.summary())
        titles = {"op": "by operator", "module": "by module", "node": "slowest nodes"}
        firsts = {"op": "operator", "module": "module", "node": "node"}
        parts = [f'<ul class="fx-summary">{head}</ul>']
        for grouping, words in titles.items():
            entries = self.entries(group_by=grouping)
            body = "".join(self._html_row(entry, grouping, entries) for entry in entries[:limit])
            rest = (
                f'<p class="fx-muted">and {len(entries) - limit} more</p>'
                if len(entries) > limit
                else ""
            )
            parts.append(
                f"<h3>{words}</h3>"
                '<table class="fx-table fx-sortable"><thead><tr>'
                f'<th>{firsts[grouping]}</th><th class="fx-num">nodes</th>'
                '<th class="fx-num">time</th><th>share</th><th class="fx-num">FLOP</th>'
                f'<th class="fx-num">bytes</th></tr></thead><tbody>{body}</tbody></table>{rest}'
            )
        return "".join(parts)

    def _html_row(self, entry: Entry, grouping: str, entries: Sequence[Entry]) -> str:
        most = max((e.seconds or 0.0 for e in entries), default=0.0) or 1.0
        width = (entry.seconds or 0.0) / most
        note = f"{entry.operator} {entry.type}" if grouping == "node" else ""
        if entry.computes and grouping == "node":
            note = f"= {' + '.join(entry.computes)}  {entry.type}"
        return (
            f'<tr><td><code>{escape(entry.key)}</code> <span class="fx-muted">{escape(note)}</span>'
            f'</td><td class="fx-num">{entry.nodes}</td>'
            f'<td class="fx-num" data-v="{entry.seconds or 0}">{duration(entry.seconds)}</td>'
            f'<td class="fx-bar-cell" data-v="{entry.seconds or 0}">'
            f'<i style="--w:{width:.3f}"></i>'
            f"<span>{percent(entry.seconds or 0.0, self.node_seconds)}</span></td>"
            f'<td class="fx-num" data-v="{entry.flops or -1}">{quantity(entry.flops)}</td>'
            f'<td class="fx-num" data-v="{entry.bytes or -1}">{quantity(entry.bytes, "B")}</td>'
            "</tr>"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return notebook_bundle(str(self), self.html())

    def export_chrome_trace(self, path: str | Path) -> Path:
        """Write a trace that Perfetto and `chrome://tracing` open: nodes, modules, live memory.

        Each node has its median time; they are put one after another.
        """
        path = Path(path)
        events = list(_trace_events(self.rows))
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        return path


def _key(row: Row, group_by: str) -> str:
    if group_by == "node":
        return row.name
    if group_by == "op":
        return "compiled kernels" if row.family == "kernel" else row.operator
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row.module) or "(top level)"


def _entry(key: str, rows: Sequence[Row]) -> Entry:
    operators = {row.operator for row in rows}
    return Entry(
        key=key,
        operator=rows[0].operator if len(operators) == 1 else "",
        type=rows[0].type if len(rows) == 1 else "",
        nodes=len(rows),
        computes=rows[0].computes if len(rows) == 1 else (),
        seconds=_sum([row.seconds for row in rows]),
        flops=_sum([row.flops for row in rows]),
        uncounted=sum(row.flops is None for row in rows),
        bytes=_sum([row.bytes for row in rows]),
        live_bytes=max(
            (row.live_bytes for row in rows if row.live_bytes is not None), default=None
        ),
    )


def _sum(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _trace_events(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for number, name in enumerate(("nodes", "modules")):
        yield {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
    now = 0.0
    opened: list[tuple[str, float]] = []
    for row in rows:
        parts = row.module.split(".") if row.module else []
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        while opened and (len(opened) > len(paths) or opened[-1][0] != paths[len(opened) - 1]):
            yield _span(*opened.pop(), now, 1)
        opened.extend((path, now) for path in paths[len(opened) :])
        spent = (row.seconds or 0.0) * 1e6
        details = {"operator": row.operator, "output": row.type, "source": row.source}
        details |= {"flops": row.flops, "bytes": row.bytes}
        yield {**_span(row.name, now, now + spent, 0), "args": details}
        if row.live_bytes is not None:
            yield {
                "ph": "C",
                "pid": 1,
                "ts": now,
                "name": "live",
                "args": {"bytes": row.live_bytes},
            }
        now += spent
    while opened:
        yield _span(*opened.pop(), now, 1)


def _span(name: str, start: float, end: float, thread: int) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": start, "dur": end - start}
