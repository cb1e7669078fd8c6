"""Where the values of a run lie in one block of memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

ALIGNMENT = 64

Life = tuple[int, int, int]


def plan_scratch(lives: Sequence[Life]) -> tuple[int, list[int]]:
    """Place values so that those that are needed at the same time do not overlap.

    Each is placed in the smallest gap that holds it. Time: n log n in the number of values, as long
    as gaps are few.

    Args:
        lives: For each value its size in bytes, the step that makes it, and the last step that
            reads it; in the order of the first.

    Returns:
        Bytes in all, and the offset of each value.
    """
    end = 0
    offsets: list[int] = []
    gaps: list[tuple[int, int]] = []  # (bytes, offset)
    ending: list[tuple[int, int, int]] = []  # (last step, offset, bytes)
    for size, born, last in lives:
        while ending and ending[0][0] < born:
            _, offset, freed = ending.pop(0)
            _release(gaps, offset, freed)
        needed = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        position = bisect_left(gaps, (needed, -1))
        if position < len(gaps):
            room, offset = gaps.pop(position)
            if room > needed:
                insort(gaps, (room - needed, offset + needed))
        else:
            offset, end = end, end + needed
        offsets.append(offset)
        insort(ending, (last, offset, needed))
    return end, offsets


def _release(gaps: list[tuple[int, int]], offset: int, size: int) -> None:
    """Give memory back, joined with the gaps beside it."""
    for gap in list(gaps):
        room, start = gap
        if start + room == offset:
            gaps.remove(gap)
            offset, size = start, size + room
        elif offset + size == start:
            gaps.remove(gap)
            size += room
    insort(gaps, (size, offset))
