"""A scene as SVG text: valid XML, one file, its own style sheet, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxkit.view.drawings.layout import Point
from fxkit.view.drawings.shapes import CHARACTER, Box, Line, ModuleFrame, Scene, Tag
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.labels import FAMILIES, columns
from fxkit.view.texts.theme import drawing_rules

_LEGEND_HEIGHT, _LEGEND_CHARACTER = 30.0, 7.2


def render(
    scene: Scene,
    *,
    title: str,
    legend: Sequence[tuple[str, str]] | None = None,
    classes: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
) -> str:
    """Return the SVG of a scene.

    Args:
        scene: What is drawn.
        title: The name that a screen reader says and a browser shows.
        legend: Pairs of a colour class and its words; the families that are there when left out.
        classes: For each box that something else than its family colours, its colour class.
        notes: For each box one more line of the words that are shown when it is pointed at.
    """
    if legend is None:
        legend = _families(scene)
    rows = _legend_rows(legend, max(scene.width - 48, 320.0))
    width = max(scene.width, max((x + w for row in rows for x, w, _, _ in row), default=0) + 48)
    height = scene.height + _LEGEND_HEIGHT * len(rows)
    shift = (width - scene.width) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fx-svg" width="{_n(width)}" '
        f'height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}" role="img" '
        f'aria-label="{escape(title)}"><style>{drawing_rules()}</style>',
        f'<rect class="fx-b" width="{_n(width)}" height="{_n(height)}"/>',
        f'<g transform="translate({_n(shift)} 0)">',
        *[_frame(frame) for frame in scene.frames],
        '<g class="fx-e">',
        *[_line(line) for line in scene.lines],
        "</g>",
        *[_frame_title(frame) for frame in scene.frames],
        *[_tag(tag) for tag in scene.tags],
        *[
            _box(box, (classes or {}).get(box.name), (notes or {}).get(box.name))
            for box in scene.boxes
        ],
        "</g>",
        _legend(rows, scene.height),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def _families(scene: Scene) -> list[tuple[str, str]]:
    present = {box.family for box in scene.boxes if not box.is_module}
    return [(f"fx-c-{name}", words) for name, words in FAMILIES.items() if name in present]


def _frame(frame: ModuleFrame) -> str:
    behind = "".join(
        f'<rect class="fx-s" x="{_n(frame.x + shift)}" y="{_n(frame.y + shift)}" '
        f'width="{_n(frame.width)}" height="{_n(frame.height)}" rx="10"/>'
        for shift in ((8, 4, 0) if frame.repeats > 1 else ())
    )
    return (
        f'<g class="fx-f" data-path="{escape(frame.path)}">{behind}<rect x="{_n(frame.x)}" '
        f'y="{_n(frame.y)}" width="{_n(frame.width)}" height="{_n(frame.height)}" rx="10"/></g>'
    )


def _frame_title(frame: ModuleFrame) -> str:
    kind = f' <tspan class="fx-k">{escape(frame.kind)}</tspan>' if frame.kind else ""
    return (
        f'<g class="fx-f"><text x="{_n(frame.title_x)}" y="{_n(frame.y + 20)}">'
        f'<tspan class="fx-t">{escape(frame.title)}</tspan>{kind}</text></g>'
    )


def _line(line: Line) -> str:
    if not line.target:
        return f'<path data-v="{escape(line.value)}" d="{_curve(line.points)}"/>'
    x, y = line.points[-1]
    points = _shortened(line.points, 6.0)
    tip = f"{_n(x)},{_n(y)} {_n(x - 3.6)},{_n(y - 7)} {_n(x + 3.6)},{_n(y - 7)}"
    return (
        f'<g data-v="{escape(line.value)}" data-t="{escape(line.target)}">'
        f'<path d="{_curve(points)}"/><polygon points="{tip}"/></g>'
    )


def _shortened(points: Sequence[Point], by: float) -> list[Point]:
    """Cut the end, so that a line ends under its arrow."""
    kept = list(points)
    x, y = kept[-1]
    if len(kept) > 1 and kept[-2][0] == x and y - kept[-2][1] < by:
        kept.pop()
        x0, y0 = kept[-1]
        return [*kept[:-1], (x0, min(y0, y - by))]
    return [*kept[:-1], (x, y - by)]


def _curve(points: Sequence[Point]) -> str:
    """Draw through the points: straight where x stays, in an S else."""
    x, y = points[0]
    path = [f"M{_n(x)} {_n(y)}"]
    for px, py in points[1:]:
        if abs(px - x) < 0.05:
            if py > y:
                path.append(f"V{_n(py)}")
        else:
            middle = (y + py) / 2
            path.append(f"C{_n(x)} {_n(middle)} {_n(px)} {_n(middle)} {_n(px)} {_n(py)}")
        x, y = px, py
    return "".join(path)


def _tag(tag: Tag) -> str:
    arrow = "↳ " if not tag.at_source else ""
    more = " ↴" if tag.at_source else ""
    return (
        f'<g class="fx-g" data-v="{escape(tag.value)}"><rect x="{_n(tag.x)}" y="{_n(tag.y)}" '
        f'width="{_n(tag.width)}" height="{_n(tag.height)}" rx="9"/>'
        f'<text x="{_n(tag.x + tag.width / 2)}" y="{_n(tag.y + 12.7)}" text-anchor="middle">'
        f"{arrow}{escape(tag.text)}{more}</text></g>"
    )


def _box(box: Box, given: str | None, note: str | None) -> str:
    colour = given or f"fx-c-{box.family}"
    words = [box.path, box.operator, box.name, box.detail, box.source, note or ""]
    hover = escape("\n".join(dict.fromkeys(word for word in words if word)))
    middle = box.x + box.width / 2
    baseline = box.y + (17 if box.detail else 18.5)
    long = columns(box.title) + (columns(box.note) + 2 if box.note else 0)
    start = middle - long * CHARACTER / 2
    title = (
        f'<text x="{_n(start)}" y="{_n(baseline)}"><tspan class="fx-t">{escape(box.title)}</tspan>'
    )
    if box.note:
        x = start + (columns(box.title) + 1.5) * CHARACTER
        title += f'<tspan class="fx-k" x="{_n(x)}">{escape(box.note)}</tspan>'
    detail = (
        f'<text class="fx-d" x="{_n(middle)}" y="{_n(box.y + 31.5)}" text-anchor="middle">'
        f"{escape(box.detail)}</text>"
        if box.detail
        else ""
    )
    kind = "fx-n fx-m" if box.is_module else "fx-n"
    if colour.startswith("fx-r-"):
        kind += " fx-o"
    return (
        f'<g class="{kind}" data-n="{escape(box.name)}"><title>{hover}</title>'
        f'<rect class="{colour}" x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" '
        f'height="{_n(box.height)}" rx="6"/>{title}</text>{detail}</g>'
    )


_LegendRow = list[tuple[float, float, str, str]]


def _legend_rows(legend: Sequence[tuple[str, str]], width: float) -> list[_LegendRow]:
    rows: list[_LegendRow] = []
    x = 0.0
    for colour, words in legend:
        size = columns(words) * _LEGEND_CHARACTER + 40
        if not rows or x + size > width:
            rows.append([])
            x = 0.0
        rows[-1].append((x, size, colour, words))
        x += size
    return rows


def _legend(rows: Sequence[_LegendRow], top: float) -> str:
    parts: list[str] = []
    for i, row in enumerate(rows):
        y = top + i * _LEGEND_HEIGHT
        for x, _, colour, words in row:
            parts.append(
                f'<rect class="{colour}" x="{_n(24 + x)}" y="{_n(y)}" width="14" height="14" '
                f'rx="3"/>'
                f'<text x="{_n(24 + x + 20)}" y="{_n(y + 11.5)}">{escape(words)}</text>'
            )
    return f'<g class="fx-l">{"".join(parts)}</g>' if parts else ""


def _n(value: float) -> str:
    """Write a coordinate with one decimal, without what adds nothing."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text
