"""The contents of a report's sections, as HTML without a page around it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fxkit.passes import PASSES
from fxkit.view.profiling.profile_result import Profile
from fxkit.view.reports.work_table import work_table
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.text_table import duration, plural, quantity

_NUMBER = re.compile(r"[-+−]?[\d,.]+(?:e[-+]?\d+)?\s*(?:[%×xkMGTµnms]\w*)?/?s?|[?–-]?")


def tiles(facts: Mapping[str, object]) -> str:
    """Show a few facts large."""
    shown = "".join(
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in facts.items()
    )
    return f'<dl class="fx-tiles">{shown}</dl>'


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, sortable: bool = True
) -> str:
    """Show rows; columns that hold nothing but numbers stand to the right."""
    cells = [[("" if cell is None else str(cell)) for cell in row] for row in rows]
    numeric = [
        bool(cells) and all(_NUMBER.fullmatch(row[i].strip()) for row in cells if i < len(row))
        for i in range(len(headers))
    ]
    classes = [' class="fx-num"' if is_number else "" for is_number in numeric]
    head = "".join(f"<th{c}>{escape(h)}</th>" for h, c in zip(headers, classes, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{c}>{_lines(cell)}</td>" for cell, c in zip(row, classes, strict=False))
        + "</tr>"
        for row in cells
    )
    kind = "fx-table fx-sortable" if sortable and len(cells) > 2 else "fx-table"
    return (
        f'<div class="fx-scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bars(values: Mapping[str, float], texts: Mapping[str, str]) -> str:
    """Compare a few numbers by length; the second and later ones are coloured."""
    most = max((abs(value) for value in values.values()), default=0.0) or 1.0
    rows = "".join(
        f'<b>{escape(name)}</b><i class="{"fx-second" if i else ""}" '
        f'style="width:{100 * abs(value) / most:.2f}%"></i><span>{escape(texts[name])}</span>'
        for i, (name, value) in enumerate(values.items())
    )
    return f'<div class="fx-bars">{rows}</div>'


def passes(records: Iterable[Any]) -> str:
    """Show what each pass did: records with `name`, `seconds`, `nodes_before`, ... ."""
    rows = []
    for number, record in enumerate(records, start=1):
        before, after = record.nodes_before, record.nodes_after
        hits = Counter(record.rewrites)
        rules = "".join(
            f'<span class="fx-pill">{escape(str(name))} × {count:,}</span>'
            for name, count in hits.most_common()
        )
        change = f"{after - before:+,}" if after != before else "0"
        tone = "fx-good" if after < before else "fx-muted"
        rows.append(
            f'<tr><td class="fx-num">{number}</td>'
            f'<td style="white-space:nowrap"><b>{escape(record.name)}</b></td>'
            f'<td class="fx-muted">{escape(_purpose(record.name))}</td>'
            f'<td class="fx-num">{before:,}</td><td class="fx-num">{after:,}</td>'
            f'<td class="fx-num {tone}">{change}</td><td>{rules or _edits(record)}'
            f'{_notes(record)}</td><td class="fx-num">{duration(record.seconds)}</td></tr>'
        )
    head = (
        '<th class="fx-num">#</th><th>pass</th><th class="fx-words">what it is for</th>'
        '<th class="fx-num">nodes before</th>'
        '<th class="fx-num">after</th><th class="fx-num">change</th><th>rewrites by rule</th>'
        '<th class="fx-num">time</th>'
    )
    return (
        f'<div class="fx-scroll"><table class="fx-table"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _purpose(name: str) -> str:
    """Return the first line of what a library pass says of itself; nothing for other passes."""
    known = dict(PASSES.items()).get(re.split(r"\W", name)[0])
    return (known.__doc__ or "").strip().partition("\n")[0] if known is not None else ""


def _edits(record: Any) -> str:
    """Say in words what a pass without rules did."""
    edits = len(getattr(record, "changes", ()))
    if edits:
        return f'<span class="fx-muted">{plural(edits, "edit")}, no rules</span>'
    if record.nodes_before != record.nodes_after:
        return ""
    return '<span class="fx-muted">nothing to do</span>'


def _notes(record: Any) -> str:
    notes = getattr(record, "notes", ())
    if not notes:
        return ""
    lines = "".join(f"<div>{escape(note)}</div>" for note in notes)
    head = f"<summary>{plural(len(notes), 'note')}</summary>"
    return f'<details class="fx-muted">{head}{lines}</details>'


def kernel_kind(kernel: Any, nodes: int) -> str:
    """Say in a few words what kind of work a kernel of this many nodes does."""
    operations = {instruction.op for instruction in kernel.body}
    more = " and what follows it" if nodes > 1 else ""
    for whole in ("product", "attention"):
        if whole in operations:
            return whole + more
    if any(instruction.is_reduction for instruction in kernel.body):
        return "rows: reductions with the work around them" if nodes > 1 else "rows: a reduction"
    return "element by element"


def regions(found: Sequence[Any], kernels: Mapping[str, Any] | None = None) -> str:
    """Show regions with `name`, `nodes`, `kernel`, `reason` and `bytes_saved`.

    Args:
        found: The regions.
        kernels: What the kernels are made of, by name, to say what kind each is.
    """
    fused = [region for region in found if region.kernel is not None]
    left = [region for region in found if region.kernel is None]
    facts = {
        "kernels": len({region.kernel for region in fused}),
        "regions fused": len(fused),
        "nodes in them": sum(len(region.nodes) for region in fused),
        "memory traffic saved, a call": quantity(_saved(fused), "B"),
        "nodes left to torch (ATen)": sum(len(region.nodes) for region in left),
    }
    parts = [tiles(facts)]
    if fused:
        parts.append("<h3>fused</h3>" + _fused(fused, kernels or {}))
    if left:
        parts.append("<h3>left to torch's own kernels (ATen), and why</h3>" + _left(left))
    return "".join(parts)


def _fused(found: Sequence[Any], known: Mapping[str, Any]) -> str:
    """Show a line for each kernel: equal regions share one."""
    kernels: dict[str, list[Any]] = {}
    for region in found:
        kernels.setdefault(str(region.kernel), []).append(region)
    rows = []
    for kernel, used in sorted(kernels.items(), key=lambda item: -_saved(item[1])):
        nodes = sum(len(region.nodes) for region in used)
        more = "".join(
            f"<div><code>{escape(region.name)}</code> {_nodes(region.nodes)}</div>"
            for region in used[1:]
        )
        if more:
            head = f"<summary>{plural(len(used) - 1, 'more region')}</summary>"
            more = f"<details>{head}{more}</details>"
        kind = kernel_kind(known[kernel], len(used[0].nodes)) if kernel in known else ""
        rows.append(
            f'<tr><td><span class="fx-pill fx-yes">{escape(kernel)}</span> '
            f'<span class="fx-muted">{kind}</span></td>'
            f'<td class="fx-num">{len(used)}</td><td class="fx-num">{nodes}</td>'
            f"<td>{_nodes(used[0].nodes)}{more}</td>"
            f'<td class="fx-num" data-v="{_saved(used)}">{quantity(_saved(used), "B")}</td></tr>'
        )
    return (
        '<div class="fx-scroll"><table class="fx-table fx-sortable"><thead><tr><th>kernel</th>'
        '<th class="fx-num">regions</th><th class="fx-num">nodes</th><th>what it computes</th>'
        f'<th class="fx-num">traffic saved</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
        "</div>"
    )


def _saved(found: Sequence[Any]) -> int:
    return sum(region.bytes_saved or 0 for region in found)


def _left(found: Sequence[Any]) -> str:
    reasons: dict[str, list[str]] = {}
    for region in found:
        reasons.setdefault(region.reason or "no reason recorded", []).extend(region.nodes)
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    rows = "".join(
        f'<tr><td class="fx-num">{len(names)}</td><td>{escape(reason)}</td>'
        f"<td>{_nodes(names)}</td></tr>"
        for reason, names in ordered
    )
    return (
        '<div class="fx-scroll"><table class="fx-table"><thead><tr><th class="fx-num">nodes</th>'
        f"<th>reason</th><th>which</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _nodes(names: Sequence[str], limit: int = 8) -> str:
    shown = "".join(f'<code class="fx-pill">{escape(name)}</code>' for name in names[:limit])
    if len(names) <= limit:
        return shown
    rest = "".join(f'<code class="fx-pill">{escape(name)}</code>' for name in names[limit:])
    return f"{shown}<details><summary>{len(names) - limit} more</summary>{rest}</details>"


def profiles(
    before: Profile,
    after: Profile | None,
    names: tuple[str, str],
    seconds: tuple[float, float] | None,
) -> str:
    """Show where the time goes; with a second profile, the same work side by side."""
    if after is None:
        return before.html_fragment()
    return (
        _end_to_end(before, after, names, seconds)
        + "<h3>what takes the time</h3>"
        + work_table(before, after, names, seconds)
        + _folded(f"{names[0]}: all of it", before)
        + _folded(f"{names[1]}: all of it", after)
    )


def _end_to_end(
    before: Profile,
    after: Profile,
    names: tuple[str, str],
    seconds: tuple[float, float] | None,
) -> str:
    """Compare the whole; no ratio is claimed of two profiles when one of them is unsteady."""
    measured = seconds or (before.end_to_end or 0.0, after.end_to_end or 0.0)
    values = dict(zip(names, measured, strict=True))
    texts = {name: duration(value) for name, value in values.items()}
    is_sure = seconds is not None or (before.is_steady and after.is_steady)
    if is_sure and all(measured):
        texts[names[1]] += f"  ({measured[0] / measured[1]:.2f} × as fast)"
    note = "" if is_sure else _UNSTEADY
    return bars(values, texts) + note


_UNSTEADY = (
    '<p class="fx-muted">The runs took very different times: something else ran on this machine, '
    "and the two sides can't be compared.</p>"
)


def _folded(title: str, profile: Profile) -> str:
    return (
        f'<details class="fx-fold" style="margin-top:14px"><summary>{escape(title)}</summary>'
        f'<div style="padding:4px 16px 14px">{profile.html_fragment(limit=25)}</div></details>'
    )


def errors(values: Mapping[str, float], reference: str) -> str:
    """Compare errors by length, and say how the others stand to the first one."""
    texts = {name: f"{value:.2e}" for name, value in values.items()}
    names = list(values)
    for name in names[1:]:
        if values[names[0]]:
            texts[name] += f"  ({values[name] / values[names[0]]:.2f} × that of {names[0]})"
    return f'<p class="fx-muted">against {escape(reference)}</p>' + bars(values, texts)


def _lines(cell: str) -> str:
    return "<br>".join(escape(line) for line in cell.split("\n"))
