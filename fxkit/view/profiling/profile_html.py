"""A profile as HTML: the summary, and tables whose rows add up to a whole call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fxkit.view.profiling.profile_rows import RowEntry
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.text_table import duration, quantity

_TITLES = {"node": "slowest nodes", "op": "by operator", "module": "by module"}
_FIRSTS = {"node": "node", "op": "operator", "module": "module"}


class Measured(Protocol):
    """What the tables show of a `Profile`."""

    def summary(self) -> Sequence[str]:
        """Return what was measured, in lines."""
        ...

    def entries(self, *, group_by: str) -> Sequence[RowEntry]:
        """Return the rows, slowest first."""
        ...

    def share(self, seconds: float | None) -> str:
        """Return a time as a share of the call."""
        ...

    def without_row(self, left: Sequence[RowEntry]) -> Sequence[tuple[str, float | None]]:
        """Return the times of a call that no row shows, each with its words."""
        ...


def html_tables(profile: Measured, limit: int) -> str:
    """Return the summary and the tables; each shows so many rows, and what the others add up to."""
    head = "".join(f"<li>{escape(line)}</li>" for line in profile.summary())
    tables = [_table(profile, grouping, limit) for grouping in _TITLES]
    return f'<ul class="fx-summary">{head}</ul>{"".join(tables)}'


def _table(profile: Measured, grouping: str, limit: int) -> str:
    entries = profile.entries(group_by=grouping)
    most = max((entry.seconds or 0.0 for entry in entries), default=0.0) or 1.0
    body = "".join(_row(profile, entry, grouping, most) for entry in entries[:limit])
    rest = "".join(
        f'<tr class="fx-muted"><td>{escape(words)}</td>{_count("", grouping)}'
        f'<td class="fx-num" data-v="{seconds or 0}">{signed(seconds)}</td>'
        f"<td>{profile.share(seconds)}</td><td></td><td></td></tr>"
        for words, seconds in profile.without_row(entries[limit:])
    )
    nodes = "" if grouping == "node" else '<th class="fx-num">nodes</th>'
    return (
        f'<h3>{_TITLES[grouping]}</h3><table class="fx-table fx-sortable"><thead><tr>'
        f'<th>{_FIRSTS[grouping]}</th>{nodes}<th class="fx-num">time</th><th>share</th>'
        '<th class="fx-num">FLOP</th><th class="fx-num">bytes</th></tr></thead>'
        f"<tbody>{body}</tbody><tfoot>{rest}</tfoot></table>"
    )


def _row(profile: Measured, entry: RowEntry, grouping: str, most: float) -> str:
    width = (entry.seconds or 0.0) / most
    note = f"{entry.operator} {entry.type}" if grouping == "node" else ""
    if entry.computes and grouping == "node":
        note = f"= {' + '.join(entry.computes)}  {entry.type}"
    return (
        f'<tr><td><code>{escape(entry.key)}</code> <span class="fx-muted">{escape(note)}</span>'
        f"</td>{_count(str(entry.nodes), grouping)}"
        f'<td class="fx-num" data-v="{entry.seconds or 0}">{duration(entry.seconds)}</td>'
        f'<td class="fx-bar-cell" data-v="{entry.seconds or 0}"><i style="--w:{width:.3f}"></i>'
        f"<span>{profile.share(entry.seconds)}</span></td>"
        f'<td class="fx-num" data-v="{entry.flops or -1}">{quantity(entry.flops)}</td>'
        f'<td class="fx-num" data-v="{entry.bytes or -1}">{quantity(entry.bytes, "B")}</td></tr>'
    )


def _count(text: str, grouping: str) -> str:
    """Return the cell that says how many nodes a row stands for; one, where rows are nodes."""
    return "" if grouping == "node" else f'<td class="fx-num">{text}</td>'


def signed(seconds: float | None) -> str:
    """Show seconds that may be negative."""
    if seconds is None or seconds >= 0:
        return duration(seconds)
    return f"−{duration(-seconds)}"
