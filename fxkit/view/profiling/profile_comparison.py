"""Two profiles side by side: where time went, and where it goes now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxkit.view.profiling.profile_rows import RowEntry, grouped, total
from fxkit.view.texts.text_table import duration, quantity, table


@dataclass(frozen=True)
class Side:
    """One line of a comparison.

    Attributes:
        key: Operator, module, node or region.
        before: Seconds before; None where it isn't there.
        after: Seconds after; None where it isn't there.
        nodes_before: Number of nodes.
        nodes_after: Number of nodes.
    """

    key: str
    before: float | None
    after: float | None
    nodes_before: int
    nodes_after: int

    @property
    def change(self) -> float:
        """Seconds more, or fewer when negative."""
        return (self.after or 0.0) - (self.before or 0.0)


@dataclass(frozen=True, repr=False)
class ProfileComparison:
    """What `Profile.compare` returns.

    Attributes:
        whole: What is known of both as wholes, by name: before and after.
        lines: One for each operator (or module, node, region), the largest change first.
        group_by: What the lines are.
    """

    whole: Mapping[str, tuple[float | None, float | None]]
    lines: tuple[Side, ...]
    group_by: str

    def table(self, *, limit: int | None = 20) -> str:
        """Return the comparison as text."""
        lines = [_whole_line(name, *values) for name, values in self.whole.items()]
        shown = self.lines if limit is None else self.lines[:limit]
        rows = [
            [
                line.key,
                str(line.nodes_before or "–"),
                str(line.nodes_after or "–"),
                duration(line.before) if line.before is not None else "–",
                duration(line.after) if line.after is not None else "–",
                f"{'+' if line.change > 0 else '−'}{duration(abs(line.change))}",
            ]
            for line in shown
        ]
        heads = [self.group_by, "nodes", "after", "time", "after", "change"]
        return "\n".join([*filter(None, lines), "", table(heads, rows, align="<>>>>>")])

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        whole = {name: list(values) for name, values in self.whole.items()}
        names = ("key", "before", "after", "nodes_before", "nodes_after")
        lines = [{name: getattr(line, name) for name in names} for line in self.lines]
        return {"version": 1, "group_by": self.group_by, "whole": whole, "lines": lines}


def compare(before: Any, after: Any, group_by: str) -> ProfileComparison:
    """Compare two profiles; `Profile.compare` is the way to call it."""
    first = {entry.key: entry for entry in grouped(before.rows, group_by)}
    second = {entry.key: entry for entry in grouped(after.rows, group_by)}
    lines = [_side(key, first.get(key), second.get(key)) for key in {**first, **second}]
    return ProfileComparison(
        whole={name: (of(before), of(after)) for name, of in _WHOLE.items()},
        lines=tuple(sorted(lines, key=lambda line: -abs(line.change))),
        group_by=group_by,
    )


_WHOLE = {
    "end_to_end": lambda profile: profile.end_to_end,
    "nodes": lambda profile: profile.node_count,
    "flops": lambda profile: total([row.flops for row in profile.rows]),
    "bytes": lambda profile: total([row.bytes for row in profile.rows]),
    "peak_bytes": lambda profile: profile.peak_bytes,
}
_WORDS = {
    "end_to_end": "end-to-end",
    "nodes": "nodes",
    "flops": "FLOPs",
    "bytes": "bytes moved",
    "peak_bytes": "peak of live values",
}


def _side(key: str, before: RowEntry | None, after: RowEntry | None) -> Side:
    return Side(
        key=key,
        before=before.seconds if before else None,
        after=after.seconds if after else None,
        nodes_before=before.nodes if before else 0,
        nodes_after=after.nodes if after else 0,
    )


def _whole_line(name: str, before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return ""
    show = duration if name == "end_to_end" else quantity
    change = f" ({100 * (after - before) / before:+.1f} %)" if before and before != after else ""
    return f"{_WORDS[name]}: {show(before)} → {show(after)}{change}"
