"""Latency against a metric as SVG: what was measured, and the front that nothing is ahead of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxkit.view.profiling.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    axis_title,
    framed,
)
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.labels import clip
from fxkit.view.texts.text_table import duration

_INTERVALS = 5


@dataclass(frozen=True)
class FrontPoint:
    """One program that was measured.

    Attributes:
        seconds: Median latency of a call.
        metric: How good its results are; more is better.
        label: What it is.
        is_on_front: Whether no other one is both faster and better.
        is_answer: Whether it was chosen.
    """

    seconds: float
    metric: float
    label: str
    is_on_front: bool = False
    is_answer: bool = False


def front_chart(points: Sequence[FrontPoint], at_least: float, title: str) -> Chart:
    """Show latency against a metric: a dot a program, a line along the front.

    Args:
        points: What was measured; metrics that are not finite lie on an edge of the chart.
        at_least: What the metric should not fall below, drawn in dashes.
        title: What is measured.
    """
    finite = [one.metric for one in points if math.isfinite(one.metric)]
    x = _Linear([0.0, *(one.seconds for one in points)], LEFT, WIDTH - RIGHT)
    y = _Linear([at_least, *finite], HEIGHT - BOTTOM, TOP)
    parts = [*_axes(x, y), _asked(y, at_least), _line(points, x, y)]
    for one in points:
        kind = "peak" if one.is_answer else "c-contraction" if one.is_on_front else "dot"
        words = f"{one.label}\n{duration(one.seconds)}, metric {one.metric:.4g}"
        parts.append(
            f'<circle class="{kind}" cx="{x(one.seconds):.1f}" cy="{y(one.metric):.1f}" '
            f'r="{6 if one.is_answer else 4}"><title>{escape(words)}</title></circle>'
        )
    parts += [
        f'<text class="label" x="{x(one.seconds) + 9:.1f}" y="{y(one.metric) - 7:.1f}">'
        f"{escape(clip(one.label, 60))}</text>"
        for one in points
        if one.is_answer
    ]
    note = f"{len(points)} programs; the line joins those that no other is ahead of in both"
    return framed(title, [*parts, axis_title("latency of a call", "metric")], note, set())


class _Linear:
    """A linear axis; what lies beyond it is drawn at its end."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        self.low = low if low == 0 else low - room
        self.high = high + room
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        value = self.low if math.isnan(value) else value
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    @property
    def ticks(self) -> list[float]:
        step = (self.high - self.low) / _INTERVALS
        return [self.low + step * i for i in range(_INTERVALS + 1)]


def _axes(x: _Linear, y: _Linear) -> list[str]:
    base = HEIGHT - BOTTOM
    below = [
        f'<line class="grid" x1="{x(v):.1f}" x2="{x(v):.1f}" y1="{TOP}" y2="{base}"/>'
        f'<text class="tick" x="{x(v):.1f}" y="{base + 16}" text-anchor="middle">'
        f"{duration(v) if v else 0}</text>"
        for v in x.ticks
    ]
    beside = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.4g}</text>'
        for v in y.ticks
    ]
    return below + beside


def _asked(y: _Linear, at_least: float) -> str:
    return (
        f'<path class="roof dashed" d="M{LEFT} {y(at_least):.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="label" x="{WIDTH - RIGHT - 4}" y="{y(at_least) - 6:.1f}" '
        f'text-anchor="end">asked for: {at_least:.4g}</text>'
    )


def _line(points: Sequence[FrontPoint], x: _Linear, y: _Linear) -> str:
    front = sorted((one for one in points if one.is_on_front), key=lambda one: one.seconds)
    corners = "L".join(f"{x(one.seconds):.1f} {y(one.metric):.1f}" for one in front)
    return f'<path class="roof" d="M{corners}"/>' if len(front) > 1 else ""
