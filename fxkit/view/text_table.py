"""Plain text in aligned columns, numbers and units a person can read."""

from __future__ import annotations

from collections.abc import Sequence

from fxkit.view.labels import columns

_UNITS = ("", "k", "M", "G", "T", "P")


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, align: str = "", indent: str = ""
) -> str:
    """Lay out a table with a line under its head.

    Args:
        headers: One title a column.
        rows: Cells, as many a row as there are titles.
        align: `<` or `>` for each column; missing ones are `<`.
        indent: Text in front of each line.
    """
    widths = _widths([headers, *rows])
    rule = ["─" * width for width in widths]
    lines = aligned([headers, rule, *rows], align=align)
    return "\n".join(indent + line for line in lines)


def aligned(rows: Sequence[Sequence[str]], *, align: str = "", gap: str = "  ") -> list[str]:
    """Pad cells so that columns line up; trailing blanks are cut."""
    widths = _widths(rows)
    align = align.ljust(len(widths), "<")
    return [
        gap.join(
            pad(cell, width, side) for cell, width, side in zip(row, widths, align, strict=False)
        ).rstrip()
        for row in rows
    ]


def pad(text: str, width: int, side: str = "<") -> str:
    """Fill text with blanks to `width` columns."""
    blank = " " * max(0, width - columns(text))
    return blank + text if side == ">" else text + blank


def quantity(value: float | None, unit: str = "") -> str:
    """Show a count with three digits and a prefix: `22.7M`; None is shown as `?`."""
    if value is None:
        return "?"
    step = 0
    scaled = float(value)
    while abs(scaled) >= 999.5 and step < len(_UNITS) - 1:
        scaled /= 1000
        step += 1
    if step == 0 and scaled == int(scaled):
        digits = f"{int(scaled)}"
    else:
        digits = f"{scaled:.3g}" if abs(scaled) < 99.95 else f"{scaled:.0f}"
    return f"{digits}{' ' if unit else ''}{_UNITS[step]}{unit}"


def duration(seconds: float | None) -> str:
    """Show seconds with three digits in the unit that fits: `1.23 ms`; None is shown as `?`."""
    if seconds is None:
        return "?"
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit * 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds)} s"


def percent(part: float, whole: float) -> str:
    """Show a share with one decimal: `12.5 %`."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def plural(count: int, word: str) -> str:
    """Show a count with its word: `1 node`, `2 nodes`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _three(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    count = max((len(row) for row in rows), default=0)
    return [max((columns(row[i]) for row in rows if i < len(row)), default=0) for i in range(count)]
