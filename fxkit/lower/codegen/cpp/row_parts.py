"""Where loops over a stretch of a row begin and end, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxkit.lower.scheduling.index_intervals import IndexInterval


def clipped(
    stretch: IndexInterval, begin: str | int, end: str | int, length: int
) -> tuple[str | int, str | int]:
    """Return the bounds of a stretch of a row within those of a loop.

    Args:
        stretch: The stretch.
        begin: Where the loop begins.
        end: Where it ends.
        length: The elements of the row.
    """
    if str(begin) == "0" and str(end) == str(length):
        return stretch.begin, stretch.end
    first, last = stretch.begin, stretch.end
    return (
        f"({begin} > {first} ? {begin} : {first})" if first else begin,
        end if last == length else f"({end} < {last} ? {end} : {last})",
    )


def row_offset(sizes: Sequence[int]) -> str:
    """Return the position within a row of such sizes, as its buffers are laid out."""
    terms = [f"r{axis} * {math.prod(sizes[axis + 1 :])}" for axis in range(len(sizes) - 1)]
    return " + ".join([*terms, "j"])
