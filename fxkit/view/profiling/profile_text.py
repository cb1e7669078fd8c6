"""A profile as text: the lines of its summary, and the cells of its table."""

from __future__ import annotations

from fxkit.view.profiling.profile_html import signed
from fxkit.view.profiling.profile_numbers import ProfileNumbers
from fxkit.view.profiling.profile_rows import RowEntry
from fxkit.view.texts.labels import clip, short_operator
from fxkit.view.texts.text_table import duration, percent, plural, quantity


def cells(
    profile: ProfileNumbers, entries: list[RowEntry], group_by: str, limit: int | None
) -> tuple[list[str], list[list[str]], str, list[str]]:
    """Return the table's titles, its cells, their alignment, and lines for what has no row."""
    shown = entries if limit is None else entries[:limit]
    title = "operator" if group_by == "op" else group_by
    headers = [title, "operator", "output", "nodes", "time", "share", "FLOP", "FLOP/s", "bytes"]
    headers += ["live", "inside"]
    rows = [_row(profile, entry) for entry in shown]
    dropped = {"node": [3], "region": [2]}.get(group_by, [1, 2])
    if group_by != "node" or profile.peak_bytes is None:
        dropped = [*dropped, 9, 10]
    keep = [i for i in range(len(headers)) if i not in dropped]
    return (
        [headers[i] for i in keep],
        [[row[i] for i in keep] for row in rows],
        "".join("<<<>>>>>>>>"[i] for i in keep),
        [
            f"{words}, {_time_and_share(profile, seconds)}"
            for words, seconds in profile.without_row(entries[len(shown) :])
        ],
    )


def _row(profile: ProfileNumbers, entry: RowEntry) -> list[str]:
    rate = entry.flops / entry.seconds if entry.flops and entry.seconds else None
    mark = "+?" if entry.uncounted and entry.flops is not None else ""
    return [
        clip(entry.key, 48),
        clip(" + ".join(entry.computes) or entry.operator, 34),
        clip(entry.type, 28),
        str(entry.nodes),
        f"{duration(entry.seconds)}{_signs(entry)}",
        profile.share(entry.seconds),
        quantity(entry.flops) + mark,
        quantity(rate) if rate else "",
        quantity(entry.bytes),
        quantity(entry.live_bytes),
        quantity(entry.workspace_bytes),
    ]


def _time_and_share(profile: ProfileNumbers, seconds: float | None) -> str:
    return f"{signed(seconds)} ({profile.share(seconds)})"


def summary(profile: ProfileNumbers) -> list[str]:
    """Return what matters of the whole, as lines of text."""
    lines = [
        f"{profile.title}: {plural(profile.node_count, 'node')}, of which {len(profile.rows):,} "
        f"compute; {plural(profile.threads, 'thread')}"
    ]
    if profile.end_to_end is not None:
        share = percent(profile.node_seconds, profile.end_to_end)
        lines[0] += f", {plural(profile.iters, 'run')} after {profile.warmup} to warm up"
        lines.append(
            f"end-to-end {duration(profile.end_to_end)}; sum of nodes "
            f"{duration(profile.node_seconds)} ({share}); timers add {_overhead_text(profile)}"
        )
        lines.extend([*_outside(profile), *_disagreeing(profile), *_unsteady(profile)])
    known = [row.flops for row in profile.rows if row.flops is not None]
    if known or any(row.bytes is not None for row in profile.uncounted):
        lines.append(_flop_line(profile, sum(known) if known else None))
    lines.extend(_memory_lines(profile))
    return [*lines, *_marks(profile)]


def _memory_lines(profile: ProfileNumbers) -> list[str]:
    """Say who holds the peak of live values, and what operators take besides."""
    if profile.peak_bytes is None:
        return []
    where = max(profile.rows, key=lambda row: row.live_bytes or 0, default=None)
    at = f", while %{where.name} runs" if where else ""
    held = [f"%{name} {quantity(size, 'B')}" for name, size in profile.peak_holders[:4]]
    more = len(profile.peak_holders) - len(held)
    by = f": {', '.join(held)}{f' and {more} more' if more else ''}" if held else ""
    lines = [f"peak of live values {quantity(profile.peak_bytes, 'B')}{at}{by}"]
    inside = profile.peak_with_workspace
    if profile.allocator_peak is None or inside is None:
        return lines
    top = max(profile.rows, key=lambda row: (row.live_bytes or 0) + (row.workspace_bytes or 0))
    parts = f"{quantity(top.live_bytes, 'B')} live and {quantity(top.workspace_bytes, 'B')}"
    lines.append(
        f"peak with what operators take inside {quantity(inside, 'B')}: {parts} inside of "
        f"%{top.name}; torch's allocator {quantity(profile.allocator_peak, 'B')}"
    )
    return lines


def _marks(profile: ProfileNumbers) -> list[str]:
    reused = sum(row.is_reused for row in profile.rows)
    bound = sum(row.is_launch_bound for row in profile.rows)
    lines = []
    if reused:
        measured = len(profile.rows) - reused
        lines.append(
            f"{plural(measured, 'node')} measured; times marked * are the baseline's: {reused}"
        )
    if bound:
        lines.append(f"times marked ! are bound by their launch: {plural(bound, 'node')}")
    return lines


def _unsteady(profile: ProfileNumbers) -> list[str]:
    low, high = profile.quartiles or (0.0, 0.0)
    if profile.is_steady:
        return []
    return [
        f"unsteady: half of the runs took between {duration(low)} and {duration(high)}; is "
        "something else running on this machine?"
    ]


def _outside(profile: ProfileNumbers) -> list[str]:
    """Say how much of a call is no node's, where that is more than a tenth of it."""
    outside, whole = profile.outside_seconds, profile.end_to_end or 0.0
    if outside <= max(0.1 * whole, profile.spread) or not profile.is_steady:
        return []
    return [
        f"outside of nodes {duration(outside)} ({percent(outside, whole)}): Python between "
        "them, the call of the module itprofile, its hooks, inputs and outputs"
    ]


def _disagreeing(profile: ProfileNumbers) -> list[str]:
    if not profile.disagreement:
        return []
    more = "more" if profile.disagreement > 0 else "less"
    return [
        f"after {plural(profile.iters, 'run')} the nodes take "
        f"{percent(abs(profile.disagreement), 1.0)} {more} than a call, and no steady difference "
        "says why: is something else running on this machine?"
    ]


def _overhead_text(profile: ProfileNumbers) -> str:
    added = profile.overhead or 0.0
    if added <= max(profile.clock_seconds, profile.spread) or not profile.is_steady:
        added = profile.clock_seconds
    if added <= 0.0:
        return "less than the noise of the measurement"
    return f"{duration(added)} ({percent(added, profile.end_to_end or 0.0)})"


def _flop_line(profile: ProfileNumbers, total: int | None) -> str:
    line = quantity(total, "FLOP") if total is not None else "no FLOPs known"
    if total is not None and profile.end_to_end:
        line += f", {quantity(total / profile.end_to_end, 'FLOP/s')}"
    if not profile.uncounted:
        return line
    share = profile.share(sum(row.seconds or 0.0 for row in profile.uncounted))
    names = list(dict.fromkeys(short_operator(row.operator) for row in profile.uncounted))
    listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
    count = plural(len(profile.uncounted), "node")
    return f"{line}; {count} not counted, {share} of the time: {listed}"


def _signs(entry: RowEntry) -> str:
    return ("*" if entry.reused else "") + ("!" if entry.launch_bound else "")
