"""Memory planning: values of a run in one block, or in the memory of later results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ALIGNMENT = 64

# Results of fewer bytes hold nothing else before they are written.
MIN_HOST_BYTES = 4096

Life = tuple[int, int, int]

# The home of what lies in the block.
BLOCK = -1


@dataclass(frozen=True)
class Scratch:
    """Places of values.

    Attributes:
        size: Bytes of the block.
        homes: For each value the result in whose memory it lies, or `BLOCK`.
        offsets: For each value its offset there, in bytes.
    """

    size: int
    homes: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass
class _Home:
    """Memory that values share, those at least whose lives do not meet.

    Attributes:
        number: The result that owns it, or `BLOCK`.
        room: Its bytes; None for as many as are wanted.
        until: The step that writes the result.
        placed: Offset, end, and life of what lies there.
    """

    number: int
    room: int | None
    until: int
    placed: list[tuple[int, int, int, int]] = field(default_factory=list)

    def place(self, needed: int, born: int, last: int) -> int | None:
        """Return the least offset at which a value has room for its life, and keep it there."""
        offset = 0
        for start, end, from_, to in sorted(self.placed):
            if to < born or last < from_:
                continue
            if start - offset >= needed:
                break
            offset = max(offset, end)
        if self.room is not None and offset + needed > self.room:
            return None
        self.placed.append((offset, offset + needed, born, last))
        return offset


def plan_scratch(lives: Sequence[Life], results: Sequence[tuple[int, int]] = ()) -> Scratch:
    """Place values so that those that are needed at the same time do not overlap.

    The largest come first, each as near to the beginning as it can be. A value that is not read any
    more when a result is written may lie in the result's memory. Time: n² in the number of values,
    of which a run has a bounded number.

    Args:
        lives: For each value its size in bytes, the step that makes it, and the last step that
            reads it.
        results: For each result its size in bytes, and the step that makes it.
    """
    hosts = [
        _Home(number, size, born)
        for number, (size, born) in enumerate(results)
        if size >= MIN_HOST_BYTES
    ]
    hosts.sort(key=lambda host: host.room or 0)
    block = _Home(BLOCK, None, 0)
    homes, offsets = [BLOCK] * len(lives), [0] * len(lives)
    for place in sorted(range(len(lives)), key=lambda place: (-lives[place][0], place)):
        size, born, last = lives[place]
        needed = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        for home in (*(host for host in hosts if last < host.until), block):
            offset = home.place(needed, born, last)
            if offset is not None:
                homes[place], offsets[place] = home.number, offset
                break
    size = max((end for _, end, _, _ in block.placed), default=0)
    return Scratch(size, tuple(homes), tuple(offsets))
