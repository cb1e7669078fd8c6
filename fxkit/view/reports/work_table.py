"""Two profiles of the same work, line by line: what it took before, and what it takes as kernels.

A kernel computes several nodes, so the same work has other names before and after. Where the nodes
that a kernel computes are rows of the earlier profile, their times stand beside the kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxkit.view.profiling.profile_html import signed
from fxkit.view.profiling.profile_numbers import REST
from fxkit.view.profiling.profile_result import Profile
from fxkit.view.profiling.profile_rows import Row, key_of, total
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.text_table import duration, plural

SMALL = 0.005
"""Lines below this share of the time, before and after, are folded."""


@dataclass(frozen=True)
class Work:
    """One line: operators that ran one by one before, and in a kernel now.

    Attributes:
        key: The operator, or what the kernel computes.
        before: The rows of the nodes before.
        after: The rows of the nodes, or calls of kernels, after.
    """

    key: str
    before: tuple[Row, ...]
    after: tuple[Row, ...]

    @property
    def seconds(self) -> tuple[float, float]:
        """Sums of the times before and after."""
        return total([r.seconds for r in self.before]) or 0.0, (
            total([r.seconds for r in self.after]) or 0.0
        )


def same_work(before: Profile, after: Profile) -> list[Work]:
    """Return what both profiles spent time on, the longest first.

    The nodes of a kernel are set beside it only where all nodes of all kernels of its kind are rows
    of the profile before; else both stand alone, under their own names.
    """
    later: dict[str, list[Row]] = {}
    for row in after.rows:
        later.setdefault(key_of(row, "op"), []).append(row)
    names = {row.name: row for row in before.rows} if _is_same_graph(before, after) else {}
    computed: dict[str, str] = {}
    for key, rows in later.items():
        nodes = [name for row in rows for name in row.computes]
        if all(name in names for name in nodes):
            computed.update(dict.fromkeys(nodes, key))
    earlier: dict[str, list[Row]] = {}
    for row in before.rows:
        earlier.setdefault(computed.get(row.name) or key_of(row, "op"), []).append(row)
    found = [
        Work(key, tuple(earlier.get(key, ())), tuple(later.get(key, ())))
        for key in {**earlier, **later}
    ]
    return sorted(found, key=lambda work: -max(work.seconds))


def _is_same_graph(before: Profile, after: Profile) -> bool:
    """Tell whether nodes of one name are the same: none of them does something else."""
    operators = {row.name: row.operator for row in before.rows}
    kept = [row for row in after.rows if not row.computes and row.family != "kernel"]
    return all(operators.get(row.name, row.operator) == row.operator for row in kept)


def work_table(
    before: Profile,
    after: Profile,
    names: tuple[str, str],
    seconds: tuple[float, float] | None = None,
) -> str:
    """Show where the time goes, before and after, as HTML; lines add up to a whole call.

    Args:
        before: The earlier profile.
        after: The later one.
        names: What the two are called.
        seconds: Times of whole calls; those of the profiles when left out.
    """
    found = same_work(before, after)
    least = SMALL * max(before.node_seconds, after.node_seconds)
    large = [work for work in found if max(work.seconds) > least]
    small = found[len(large) :]
    longest = max((max(work.seconds) for work in large), default=0.0) or 1.0
    whole = seconds or (before.end_to_end or 0.0, after.end_to_end or 0.0)
    nodes = before.node_seconds, after.node_seconds
    rest = tuple(w - n if w else 0.0 for w, n in zip(whole, nodes, strict=True))
    shown = _table(large or small, names, longest, rest if found else None)
    if not large or not small:
        return shown
    sums = [duration(sum(work.seconds[side] for work in small)) for side in (0, 1)]
    head = f"{plural(len(small), 'more line')}, {sums[0]} in {names[0]} and {sums[1]} in {names[1]}"
    return (
        f'{shown}<details class="fx-fold" style="margin-top:14px"><summary>{escape(head)}</summary>'
        f'<div style="padding:4px 16px 14px">{_table(small, names, longest)}</div></details>'
    )


def _table(
    found: Sequence[Work],
    names: tuple[str, str],
    longest: float,
    rest: tuple[float, ...] | None = None,
) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(work.key.removeprefix('kernel: '))}</code></td>"
        f"{_cell(work.before, work.seconds[0], longest, '')}"
        f"{_cell(work.after, work.seconds[1], longest, 'fx-second')}</tr>"
        for work in found
    )
    if rest is not None and any(rest):
        cells = "".join(
            f'<td class="fx-bar-cell" data-v="{r}"><span>{signed(r)}</span></td>' for r in rest
        )
        rows += f"<tr><td>{REST}</td>{cells}</tr>"
    return (
        '<div class="fx-scroll"><table class="fx-table fx-sortable fx-twin"><thead><tr>'
        f"<th>what is computed</th><th>{escape(names[0])}</th><th>{escape(names[1])}</th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(rows: Sequence[Row], seconds: float, longest: float, kind: str) -> str:
    text = f"{duration(seconds)} · {_count(rows)}" if rows else "–"
    return (
        f'<td class="fx-bar-cell" data-v="{seconds}"><i class="{kind}" '
        f'style="--w:{seconds / longest:.3f}"></i><span>{text}</span></td>'
    )


def _count(rows: Sequence[Row]) -> str:
    return plural(len(rows), "kernel call" if rows[0].computes else "node")
