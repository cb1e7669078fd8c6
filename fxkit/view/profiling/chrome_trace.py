"""A profile as a trace that Perfetto and `chrome://tracing` open: nodes, modules, live memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fxkit.view.profiling.profile_rows import Row


def trace_events(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the events; each node takes its typical time, one after another."""
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
        details |= {"flops": row.flops, "bytes": row.bytes, "computes": list(row.computes)}
        yield {**_span(row.name, now, now + spent, 0), "args": details}
        if row.live_bytes is not None:
            live = {"bytes": row.live_bytes}
            yield {"ph": "C", "pid": 1, "ts": now, "name": "live", "args": live}
        now += spent
    while opened:
        yield _span(*opened.pop(), now, 1)


def _span(name: str, start: float, end: float, thread: int) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": start, "dur": end - start}
