"""Plain text in aligned columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


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


def columns(text: str) -> int:
    """Return how many columns of a fixed-width font the text takes; wide characters take two."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.combining(character)
        else 2
        if unicodedata.east_asian_width(character) in "WF"
        else 1
        for character in text
    )


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    count = max((len(row) for row in rows), default=0)
    return [max((columns(row[i]) for row in rows if i < len(row)), default=0) for i in range(count)]
