"""The horizontal coordinates of a layered drawing: no overlap, short and straight lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from fxkit.view.ranks import Vertices

_GAP_BOXES, _GAP_DUMMY = 26.0, 13.0


def coordinates(vertices: Vertices, order: list[list[int]]) -> list[float]:
    """Let each rank follow its neighbours, in turns, at the least squared distance."""
    x = [0.0] * len(vertices.rank)
    distances = []
    for row in order:
        gaps = [_distance(vertices, a, b) for a, b in pairwise(row)]
        distances.append(gaps)
        left = -sum(gaps) / 2
        for i, vertex in enumerate(row):
            x[vertex] = left
            left += gaps[i] if i < len(gaps) else 0.0
    size = len(vertices.rank)
    sweeps = 14 if size < 3000 else 6 if size < 30000 else 3
    for sweep in range(sweeps):
        final = sweep >= sweeps - 2
        down = sweep % 2 == 0
        rows = range(len(order)) if down else range(len(order) - 1, -1, -1)
        for r in rows:
            _settle(vertices, order[r], distances[r], x, up=final or down, down=final or not down)
    return x


def _distance(vertices: Vertices, a: int, b: int) -> float:
    gap = _GAP_DUMMY if vertices.is_dummy[a] or vertices.is_dummy[b] else _GAP_BOXES
    return (vertices.width[a] + vertices.width[b]) / 2 + gap


def _settle(
    vertices: Vertices, row: list[int], gaps: list[float], x: list[float], *, up: bool, down: bool
) -> None:
    wanted: list[float] = []
    weights: list[float] = []
    is_dummy = vertices.is_dummy
    for vertex in row:
        total = mass = 0.0
        sides = []
        if up:
            sides.append((vertices.above[vertex], vertices.below))
        if down:
            sides.append((vertices.below[vertex], vertices.above))
        for near, back in sides:
            for other, own, offset in near:
                degree = max(len(near), len(back[other]))
                weight = (1.0 + 3.0 * is_dummy[vertex] + 3.0 * is_dummy[other]) / degree
                total += weight * (x[other] + offset - own)
                mass += weight
        wanted.append(total / mass if mass else x[vertex])
        weights.append(mass or 0.05)
    for vertex, value in zip(row, _pool(wanted, weights, gaps), strict=True):
        x[vertex] = value


def _pool(wanted: list[float], weights: list[float], gaps: list[float]) -> list[float]:
    """Minimise Σ wᵢ(xᵢ − wantedᵢ)² subject to xᵢ₊₁ − xᵢ ≥ gapᵢ, by pooling adjacent violators."""
    if not gaps:
        return wanted
    blocks: list[list[float]] = []
    shift = 0.0
    shifts = []
    for i, (want, weight) in enumerate(zip(wanted, weights, strict=True)):
        shift += gaps[i - 1] if i else 0.0
        shifts.append(shift)
        blocks.append([weight * (want - shift), weight, 1])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] > blocks[-1][0] * blocks[-2][1]:
            total, mass, members = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += mass
            blocks[-1][2] += members
    values = [total / mass for total, mass, members in blocks for _ in range(int(members))]
    return [value + offset for value, offset in zip(values, shifts, strict=True)]


def straighten(
    vertices: Vertices, order: list[list[int]], x: list[float], chains: Iterable[list[int]]
) -> None:
    """Put what forms a line on one vertical, as far as the neighbours leave room.

    Lines are the dummies of one value, and boxes of which each has the next one as its only user.
    """
    place_in_row = {vertex: i for row in order for i, vertex in enumerate(row)}

    def room(vertex: int) -> tuple[float, float]:
        row, i = order[vertices.rank[vertex]], place_in_row[vertex]
        low, high = float("-inf"), float("inf")
        if i:
            low = x[row[i - 1]] + _distance(vertices, row[i - 1], vertex)
        if i + 1 < len(row):
            high = x[row[i + 1]] - _distance(vertices, vertex, row[i + 1])
        return low, high

    runs = [run for run in _runs(vertices) if len(run) > 1]
    dummies = [[(vertex, 0.0) for vertex in chain] for chain in chains if chain]
    for line in [*runs, *dummies, *runs]:
        for piece, low, high in _pieces(line, room):
            wanted = sorted(x[vertex] - shift for vertex, shift in piece)
            base = min(max(wanted[len(wanted) // 2], low), high)
            for vertex, shift in piece:
                x[vertex] = base + shift


_Line = list[tuple[int, float]]


def _runs(vertices: Vertices) -> Iterator[_Line]:
    """Find the lines of vertices with one edge between each two, with each one's shift."""
    above, below = vertices.above, vertices.below
    follows = [
        len(above[v]) == 1 and len(below[above[v][0][0]]) == 1 for v in range(len(vertices.rank))
    ]
    for start in range(len(follows)):
        if follows[start]:
            continue
        line, vertex, shift = [(start, 0.0)], start, 0.0
        while len(below[vertex]) == 1 and follows[below[vertex][0][0]]:
            lower, exit_, entry = below[vertex][0]
            shift += exit_ - entry
            line.append((lower, shift))
            vertex = lower
        yield line


def _pieces(
    line: _Line, room: Callable[[int], tuple[float, float]]
) -> Iterator[tuple[_Line, float, float]]:
    """Cut a line into pieces for which a common vertical exists, with the range of it."""
    piece: _Line = []
    low, high = float("-inf"), float("inf")
    for vertex, shift in line:
        left, right = (side - shift for side in room(vertex))
        if piece and max(low, left) > min(high, right):
            yield piece, low, high
            piece, low, high = [], float("-inf"), float("inf")
        piece.append((vertex, shift))
        low, high = max(low, left), min(high, right)
    if piece and low <= high:
        yield piece, low, high
