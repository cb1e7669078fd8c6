"""Charts of a profile as SVG: the roofline, and live memory over the nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxkit.view.pages.page import write_file
from fxkit.view.profiling.peaks import Peaks
from fxkit.view.profiling.profile_rows import Row
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.labels import FAMILIES, clip, short_operator
from fxkit.view.texts.text_table import quantity
from fxkit.view.texts.theme import DARK, FAMILY_COLOURS, LIGHT, SANS

WIDTH, HEIGHT = 860.0, 460.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 24.0, 56.0, 62.0
"""Of a chart, and of the margins around its axes, in pixels."""


class Chart(str):
    """SVG text; a notebook shows it as a picture."""

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file that ends in `.svg`; returns its path."""
        return write_file(path, str(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"image/svg+xml": str(self), "text/plain": "a chart; .save('chart.svg') writes it"}


def roofline(
    rows: Sequence[Row], peaks: Peaks, title: str, *, beside: Peaks | None = None
) -> Chart:
    """Show how near each node comes to what the device can do.

    Args:
        rows: Nodes; those without time, operations or bytes are left out.
        peaks: What the device can do.
        title: What is measured.
        beside: Roofs from elsewhere, drawn in dashes.
    """
    found = [r for r in rows if r.seconds and r.flops and r.intensity]
    points = [(r.intensity or 0.0, (r.flops or 0) / (r.seconds or 1.0), r) for r in found]
    ridge = peaks.flops_per_second / peaks.bytes_per_second
    xs = [ridge / 8, ridge * 8, *(x for x, _, _ in points)]
    ys = [peaks.flops_per_second / 1000, peaks.flops_per_second, *(y for _, y, _ in points)]
    if beside is not None:
        ys.append(beside.flops_per_second)
        xs.append(8 * beside.flops_per_second / beside.bytes_per_second)
    x, y = _Log(xs, LEFT, WIDTH - RIGHT), _Log(ys, HEIGHT - BOTTOM, TOP)
    parts = [*_log_axes(x, y, "FLOP a byte", "FLOP a second"), *_roofs(x, y, peaks)]
    if beside is not None:
        parts.extend(_roofs(x, y, beside, "roof dashed"))
    whole = sum(r.seconds or 0.0 for r in rows) or 1.0
    placed: list[tuple[float, float]] = []
    for intensity, rate, row in sorted(points, key=lambda point: -(point[2].seconds or 0.0)):
        share = (row.seconds or 0.0) / whole
        parts.append(_point(x(intensity), y(rate), share, row, placed))
    families = {row.family for _, _, row in points}
    left = len(rows) - len(points)
    sheet = f"; in dashes: {beside.how}" if beside is not None else ""
    note = f"{peaks.how}{sheet}; the area of a point is its share of the time"
    note += f"; {left} nodes without FLOPs or bytes are left out" if left else ""
    return framed(f"{title}: roofline", parts, note, families)


def memory_timeline(
    rows: Sequence[Row], peak: int, holders: Sequence[tuple[str, int]], title: str
) -> Chart:
    """Show the bytes that are live while each node runs, and who holds the peak."""
    known = [row for row in rows if row.live_bytes is not None]
    most = float(max([peak, 1]))
    right = WIDTH - RIGHT
    step = (right - LEFT) / max(len(known), 1)
    base = HEIGHT - BOTTOM

    def height(value: float) -> float:
        return base - (base - TOP) * value / most

    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{height(v):.1f}" y2="{height(v):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{height(v) + 4:.1f}" text-anchor="end">'
        f"{quantity(v, 'B')}</text>"
        for v in (0.0, most / 4, most / 2, 3 * most / 4, most)
    ]
    corners = [f"M{LEFT} {base}"]
    for i, row in enumerate(known):
        corners.append(f"V{height(row.live_bytes or 0):.1f}H{LEFT + (i + 1) * step:.1f}")
    parts.append(f'<path class="area" d="{"".join(corners)}V{base}Z"/>')
    parts.extend(
        f'<rect class="hit" x="{LEFT + i * step:.1f}" y="{TOP}" width="{max(step, 0.1):.2f}" '
        f'height="{base - TOP:.1f}"><title>{escape(row.name)}\n{quantity(row.live_bytes, "B")}'
        "</title></rect>"
        for i, row in enumerate(known)
    )
    at = next((i for i, row in enumerate(known) if row.live_bytes == peak), 0)
    middle = LEFT + (at + 0.5) * step
    if known:
        anchor = "end" if middle > (LEFT + right) / 2 else "start"
        words = f"{quantity(peak, 'B')} while {clip(known[at].name, 40)} runs"
        parts.append(f'<circle class="peak" cx="{middle:.1f}" cy="{height(peak):.1f}" r="4"/>')
        parts.append(
            f'<text class="label" x="{middle + (8 if anchor == "start" else -8):.1f}" '
            f'y="{height(peak) - 8:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )
    parts.append(axis_title("nodes, in the order they run", "live bytes"))
    held = ", ".join(f"{clip(name, 30)} {quantity(size, 'B')}" for name, size in holders[:5])
    more = f" and {len(holders) - 5} more" if len(holders) > 5 else ""
    return framed(f"{title}: live memory", parts, f"held at the peak: {held}{more}", set())


class _Log:
    """A logarithmic axis between whole powers of ten."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        known = [math.log10(value) for value in values if value > 0]
        self.low = math.floor(min(known, default=0.0))
        self.high = max(math.ceil(max(known, default=1.0)), self.low + 1)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(max(value, 1e-300)) - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    @property
    def ticks(self) -> list[float]:
        every = max(1, math.ceil((self.high - self.low) / 8))
        return [10.0**power for power in range(self.low, self.high + 1, every)]


def _log_axes(x: _Log, y: _Log, below: str, beside: str) -> list[str]:
    base = HEIGHT - BOTTOM
    parts = [
        f'<line class="grid" x1="{x(v):.1f}" x2="{x(v):.1f}" y1="{TOP}" y2="{base}"/>'
        f'<text class="tick" x="{x(v):.1f}" y="{base + 16}" text-anchor="middle">{_power(v)}</text>'
        for v in x.ticks
    ]
    parts += [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">'
        f"{quantity(v)}</text>"
        for v in y.ticks
    ]
    return [*parts, axis_title(below, beside)]


def _power(value: float) -> str:
    return quantity(value) if value >= 1 else f"{value:g}"


def axis_title(below: str, beside: str) -> str:
    """Return the words below the horizontal axis and beside the vertical one."""
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - BOTTOM + 34}" '
        f'text-anchor="middle">{below}</text>'
        f'<text class="axis" x="16" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 16 {middle})">{beside}</text>'
    )


def _roofs(x: _Log, y: _Log, peaks: Peaks, style: str = "roof") -> list[str]:
    ridge = peaks.flops_per_second / peaks.bytes_per_second
    start = 10.0**x.low
    floor = 10.0**y.low
    from_x = max(start, floor / peaks.bytes_per_second)
    top = y(peaks.flops_per_second)
    path = (
        f"M{x(from_x):.1f} {y(from_x * peaks.bytes_per_second):.1f}L{x(ridge):.1f} {top:.1f}"
        f"H{WIDTH - RIGHT}"
    )
    return [
        f'<path class="{style}" d="{path}"/>',
        f'<text class="label" x="{WIDTH - RIGHT - 4}" y="{top - 7:.1f}" text-anchor="end">'
        f"{quantity(peaks.flops_per_second, 'FLOP/s')}</text>",
        f'<text class="label" x="{x(ridge) - 14:.1f}" y="{top + 4:.1f}" text-anchor="end">'
        f"{quantity(peaks.bytes_per_second, 'B/s')}</text>",
    ]


def _point(x: float, y: float, share: float, row: Row, placed: list[tuple[float, float]]) -> str:
    radius = 3.0 + 22.0 * math.sqrt(share)
    words = f"{row.name}\n{row.operator} {row.type}\n{100 * share:.1f} % of the time"
    circle = (
        f'<circle class="c-{row.family}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
        f"<title>{escape(words)}</title></circle>"
    )
    is_free = all(abs(x - px) > 110 or abs(y - py) > 15 for px, py in placed)
    if len(placed) >= 8 or share < 0.01 or not is_free:
        return circle
    placed.append((x, y))
    name = short_operator(row.operator) if not row.computes else row.name
    return (
        f'{circle}<text class="label" x="{x + radius + 4:.1f}" y="{y + 4:.1f}">'
        f"{escape(name)}</text>"
    )


def framed(title: str, parts: Sequence[str], note: str, families: set[str]) -> Chart:
    """Return a chart of parts within WIDTH and HEIGHT, with a title, a legend and a note below."""
    legend, at = [], LEFT
    for family in (f for f in FAMILIES if f in families):
        legend.append(
            f'<circle class="c-{family}" cx="{at + 5:.0f}" cy="{HEIGHT - 8}" r="5"/>'
            f'<text class="tick" x="{at + 14:.0f}" y="{HEIGHT - 4}">{family}</text>'
        )
        at += 30 + 7 * len(family)
    shown = "".join(parts) + "".join(legend)
    below = 18 if legend else 0
    return Chart(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fx-chart" width="{WIDTH:.0f}" '
        f'height="{HEIGHT + below:.0f}" viewBox="0 0 {WIDTH:.0f} {HEIGHT + below:.0f}" '
        f'role="img" aria-label="{escape(title)}"><style>{_style()}</style>'
        f'<rect class="page" width="{WIDTH:.0f}" height="{HEIGHT + below:.0f}"/>'
        f'<text class="head" x="{LEFT}" y="22">{escape(title)}</text>{shown}'
        f'<text class="tick" x="{LEFT}" y="{HEIGHT - 4 + below:.0f}">'
        f"{escape(clip(note, 150))}</text></svg>"
    )


def _style() -> str:
    return _rules(LIGHT, 0) + f"@media(prefers-color-scheme:dark){{{_rules(DARK, 2)}}}"


def _rules(colours: Any, offset: int) -> str:
    scope = ".fx-chart"
    inks = {name: values[offset + 1] for name, values in FAMILY_COLOURS.items()}
    families = "".join(
        f"{scope} .c-{name}{{fill:{ink};fill-opacity:.45;stroke:{ink}}}"
        for name, ink in inks.items()
    )
    return (
        f"{scope} text{{font:12px {SANS};fill:{colours['ink']}}}"
        f"{scope} .head{{font-size:14px;font-weight:600}}"
        f"{scope} .tick,{scope} .axis{{font-size:11px;fill:{colours['muted']}}}"
        f"{scope} .page{{fill:{colours['page']}}}"
        f"{scope} .grid{{stroke:{colours['line']};stroke-width:.7}}"
        f"{scope} .roof{{fill:none;stroke:{colours['accent']};stroke-width:2}}"
        f"{scope} .dashed{{stroke-width:1.2;stroke-dasharray:6 4}}"
        f"{scope} .area{{fill:{colours['accent']};fill-opacity:.22;stroke:{colours['accent']}}}"
        f"{scope} .peak{{fill:{colours['bad']}}}{scope} .dot{{fill:{colours['muted']}}}"
        f"{scope} .hit{{fill:transparent}}{families}"
    )
