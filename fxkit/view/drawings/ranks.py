"""The order of vertices within the ranks of a layered drawing, with few crossings."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field


@dataclass(slots=True)
class Vertices:
    """Boxes, stubs and dummies of a level, as parallel lists."""

    width: list[float]
    height: list[float]
    rank: list[int]
    is_dummy: list[bool]
    above: list[list[tuple[int, float, float]]] = field(default_factory=list)
    below: list[list[tuple[int, float, float]]] = field(default_factory=list)

    def add(self, width: float, height: float, rank: int, *, is_dummy: bool = False) -> int:
        self.width.append(width)
        self.height.append(height)
        self.rank.append(rank)
        self.is_dummy.append(is_dummy)
        self.above.append([])
        self.below.append([])
        return len(self.width) - 1

    def join(self, upper: int, exit_: float, lower: int, entry: float) -> None:
        """Connect two vertices of neighbouring ranks: (other, own offset, other's offset)."""
        self.below[upper].append((lower, exit_, entry))
        self.above[lower].append((upper, entry, exit_))


def order_ranks(vertices: Vertices) -> list[list[int]]:
    """Order each rank by barycentres, down and up; the order with the fewest crossings is kept."""
    order: list[list[int]] = [[] for _ in range(max(vertices.rank, default=-1) + 1)]
    for vertex in _depth_first(vertices):
        order[vertices.rank[vertex]].append(vertex)
    size = len(vertices.rank)
    sweeps = 8 if size < 3000 else 4 if size < 30000 else 2
    best, best_crossings = [row[:] for row in order], _crossings(vertices, order)
    position = [0.0] * size
    for row in order:
        for i, vertex in enumerate(row):
            position[vertex] = i
    for sweep in range(sweeps):
        if not best_crossings:
            break
        down = sweep % 2 == 0
        near = vertices.above if down else vertices.below
        for row in order[1:] if down else order[-2::-1]:
            _sort_by_barycentre(vertices, row, near, position)
        crossings = _crossings(vertices, order)
        if crossings < best_crossings:
            best, best_crossings = [row[:] for row in order], crossings
    return best


def _sort_by_barycentre(
    vertices: Vertices,
    row: list[int],
    near: list[list[tuple[int, float, float]]],
    position: list[float],
) -> None:
    width = vertices.width
    keys = {}
    for vertex in row:
        neighbours = near[vertex]
        if neighbours:
            total = sum(position[n] + offset / (width[n] + 1) for n, _, offset in neighbours)
            keys[vertex] = total / len(neighbours)
        else:
            keys[vertex] = position[vertex]
    row.sort(key=keys.__getitem__)
    for i, vertex in enumerate(row):
        position[vertex] = i


def _depth_first(vertices: Vertices) -> list[int]:
    """Visit the vertices so that what hangs together stands together in each rank."""
    seen = [False] * len(vertices.rank)
    visited: list[int] = []
    roots = sorted(range(len(seen)), key=lambda vertex: vertices.rank[vertex])
    for root in roots:
        if seen[root]:
            continue
        stack = [root]
        while stack:
            vertex = stack.pop()
            if seen[vertex]:
                continue
            seen[vertex] = True
            visited.append(vertex)
            stack.extend(other for other, _, _ in reversed(vertices.below[vertex]))
    return visited


def _crossings(vertices: Vertices, order: list[list[int]]) -> int:
    """Count crossings between neighbouring ranks."""
    total = 0
    position = [0] * len(vertices.rank)
    for row in order:
        for i, vertex in enumerate(row):
            position[vertex] = i
    for row in order:
        if len(row) < 2:
            continue
        seen: list[tuple[int, float]] = []
        for vertex in row:
            ends = sorted(
                (position[other], entry)
                for other, _, entry in sorted(vertices.below[vertex], key=lambda end: end[1])
            )
            for end in ends:
                total += len(seen) - _count_up_to(seen, end)
            for end in ends:
                insort(seen, end)
    return total


def _count_up_to(values: list[tuple[int, float]], limit: tuple[int, float]) -> int:
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= limit:
            low = middle + 1
        else:
            high = middle
    return low
