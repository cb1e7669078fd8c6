"""The horizontal coordinates of a layered drawing: no overlap, short and straight lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from fxkit.view.drawings.ranks import Vertices

_GAP_BOXES, _GAP_DUMMY = 26.0, 13.0

_STILL = 0.5
"""Pixels: when no vertex of a sweep moves farther, more sweeps change nothing that is seen."""


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
    above = _pulls(vertices, vertices.above, vertices.below)
    below = _pulls(vertices, vertices.below, vertices.above)
    both = [up + down for up, down in zip(above, below, strict=True)]
    upwards = list(zip(order, distances, strict=True))[::-1]
    for sweep in range(_sweeps(len(x))):
        down = sweep % 2 == 0
        rows = reversed(upwards) if down else upwards
        moved = 0.0
        for row, gaps in rows:
            moved = max(moved, _settle(row, gaps, x, above if down else below))
        if sweep and moved < _STILL:
            break
    for rows in (reversed(upwards), upwards):
        for row, gaps in rows:
            _settle(row, gaps, x, both)
    return x


def _sweeps(vertices: int) -> int:
    return 12 if vertices < 3000 else 4 if vertices < 30000 else 1


_Ends = list[list[tuple[int, float, float]]]


def _pulls(vertices: Vertices, near: _Ends, back: _Ends) -> _Ends:
    """Return for each vertex where its neighbours on one side want it: (other, shift, weight)."""
    is_dummy = vertices.is_dummy
    return [
        [
            (
                other,
                offset - own,
                (1.0 + 3.0 * is_dummy[vertex] + 3.0 * is_dummy[other])
                / max(len(ends), len(back[other])),
            )
            for other, own, offset in ends
        ]
        for vertex, ends in enumerate(near)
    ]


def _distance(vertices: Vertices, a: int, b: int) -> float:
    gap = _GAP_DUMMY if vertices.is_dummy[a] or vertices.is_dummy[b] else _GAP_BOXES
    return (vertices.width[a] + vertices.width[b]) / 2 + gap


def _settle(row: list[int], gaps: list[float], x: list[float], pulls: _Ends) -> float:
    """Move a rank to where its neighbours want it; return how far a vertex moved at most."""
    wanted: list[float] = []
    weights: list[float] = []
    for vertex in row:
        total = mass = 0.0
        for other, shift, weight in pulls[vertex]:
            total += weight * (x[other] + shift)
            mass += weight
        wanted.append(total / mass if mass else x[vertex])
        weights.append(mass or 0.05)
    moved = 0.0
    for vertex, value in zip(row, _pool(wanted, weights, gaps), strict=True):
        moved = max(moved, abs(value - x[vertex]))
        x[vertex] = value
    return moved


def _pool(wanted: list[float], weights: list[float], gaps: list[float]) -> list[float]:
    """Minimise Σ wᵢ(xᵢ − wantedᵢ)² subject to xᵢ₊₁ − xᵢ ≥ gapᵢ, by pooling adjacent violators."""
    if not gaps:
        return wanted
    totals: list[float] = []
    masses: list[float] = []
    members: list[int] = []
    shift = 0.0
    shifts = []
    for i, (want, weight) in enumerate(zip(wanted, weights, strict=True)):
        shift += gaps[i - 1] if i else 0.0
        shifts.append(shift)
        total, mass, size = weight * (want - shift), weight, 1
        while totals and totals[-1] * mass > total * masses[-1]:
            total += totals.pop()
            mass += masses.pop()
            size += members.pop()
        totals.append(total)
        masses.append(mass)
        members.append(size)
    means = (total / mass for total, mass in zip(totals, masses, strict=True))
    values = [mean for mean, size in zip(means, members, strict=True) for _ in range(size)]
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
