"""Index-set splitting: a row is cut where the outcome of a guard on its index changes.

A concatenated, padded or shifted tensor reads each of its parts under a guard, such as `j < 1024`.
Evaluated at each point, a guard costs a masked load for each part. Split at the boundaries, the row
becomes a few loops in each of which every guard is constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxkit.lower.loop_ir.loop_ir import Kernel

# A row in more stretches, or with more instructions in all of them, is left in one.
MAX_STRETCHES = 6
MAX_INSTRUCTIONS = 400

# Comparisons of integers, by operation.
COMPARES: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


@dataclass(frozen=True)
class IndexInterval:
    """A part of the innermost axis.

    Attributes:
        begin: Its first index.
        end: The index behind its last one.
        known: Comparisons, by position in the body, with their outcome all along it.
    """

    begin: int
    end: int
    known: Mapping[int, bool]

    @property
    def length(self) -> int:
        """How many elements it has."""
        return self.end - self.begin


@dataclass(frozen=True)
class _Guard:
    """A comparison of `start + step * j` with a number."""

    position: int
    compare: Callable[[int, int], bool]
    start: int
    step: int
    limit: int

    def holds(self, place: int) -> bool:
        return self.compare(self.start + self.step * place, self.limit)

    def cuts(self) -> Iterator[int]:
        """Yield the indices at which the outcome may change."""
        distance = self.limit - self.start
        yield -(-distance // self.step)
        yield distance // self.step + 1


def whole_row(kernel: Kernel) -> IndexInterval:
    """Return the innermost axis of a kernel as one stretch, of which nothing is known."""
    return IndexInterval(0, kernel.sizes[-1] if kernel.sizes else 1, {})


def stretches(kernel: Kernel) -> tuple[IndexInterval, ...]:
    """Cut the innermost axis of a kernel; in one stretch, of which nothing is known, at least.

    Args:
        kernel: The kernel; its row has at least one axis. Numbers that are known only at run time
            cut nothing.
    """
    whole = (whole_row(kernel),)
    length = whole[0].end
    guards = list(_guards(kernel)) if kernel.sizes and type(length) is int else []
    cuts = {cut for guard in guards for cut in guard.cuts() if 0 < cut < length}
    bounds = [0, *sorted(cuts), length]
    found: list[IndexInterval] = []
    for begin, end in itertools.pairwise(bounds):
        known = {guard.position: guard.holds(begin) for guard in guards}
        found.append(IndexInterval(begin, end, known))
    found = list(merged(found, {guard.position for guard in guards}))
    is_too_long = len(found) * len(kernel.body) > MAX_INSTRUCTIONS
    return whole if not found or len(found) > MAX_STRETCHES or is_too_long else tuple(found)


def merged(
    parts: Sequence[IndexInterval], conditions: Collection[int]
) -> tuple[IndexInterval, ...]:
    """Return stretches of which some of the conditions alone are of interest."""
    found: list[IndexInterval] = []
    for stretch in parts:
        known = {p: holds for p, holds in stretch.known.items() if p in conditions}
        begin = stretch.begin
        if found and found[-1].known == known:
            begin = found.pop().begin
        found.append(IndexInterval(begin, stretch.end, known))
    return tuple(found)


def computed(kernel: Kernel, stretch: IndexInterval) -> set[int]:
    """Return the values of a kernel that something comes of along a stretch of its row.

    Nothing comes of what is not chosen there, and of memory that is not touched.
    """
    found: set[int] = set()
    open_ = [store.value for store in kernel.stores]
    open_ += [p for p, i in enumerate(kernel.body) if i.is_reduction or i.op == "check"]
    while open_:
        position = open_.pop()
        if position in found:
            continue
        if not stretch.known:  # then no condition is, and all operands count
            found.add(position)
            open_ += kernel.body[position].operands
        elif outcome(kernel, stretch, position) is None:
            found.add(position)
            open_ += _chosen(kernel, stretch, position)
    return found


def outcome(kernel: Kernel, stretch: IndexInterval, position: int) -> bool | None:
    """Return what a condition is all along a stretch, or None where that is not known."""
    instruction = kernel.body[position]
    if position in stretch.known:
        return stretch.known[position]
    if instruction.dtype != torch.bool or instruction.op not in ("and", "or", "not"):
        return None
    operands = [outcome(kernel, stretch, o) for o in instruction.operands]
    if instruction.op == "not":
        return None if operands[0] is None else not operands[0]
    settling = instruction.op == "or"
    if settling in operands:
        return settling
    return None if None in operands else not settling


def _chosen(kernel: Kernel, stretch: IndexInterval, position: int) -> tuple[int, ...]:
    """Return the operands of a value that count along a stretch."""
    instruction = kernel.body[position]
    operands = instruction.operands
    if instruction.op == "select":
        condition = outcome(kernel, stretch, operands[0])
        return operands if condition is None else (operands[1 if condition else 2],)
    if instruction.op == "load" and instruction.guard is not None:
        return () if outcome(kernel, stretch, instruction.guard) is False else operands
    return operands


def _guards(kernel: Kernel) -> Iterator[_Guard]:
    for position, instruction in enumerate(kernel.body):
        if instruction.op not in COMPARES:
            continue
        left, right = (kernel.body[o] for o in instruction.operands)
        compare = COMPARES[instruction.op]
        if left.op == "const" and right.op == "index":
            left, right, compare = right, left, _turned(compare)
        if left.op != "index" or right.op != "const":
            continue
        *others, step = left.detail.strides
        numbers = (left.detail.offset, step, right.detail.value)
        if step and not any(others) and all(type(number) is int for number in numbers):
            yield _Guard(position, compare, *numbers)


def _turned(compare: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
    return lambda a, b: compare(b, a)
