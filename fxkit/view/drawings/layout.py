"""Place boxes in layers: ranks, order within a rank, coordinates, and routes between boxes.

The steps are those of Sugiyama, Tagawa and Toda (1981): longest-path ranks, dummies on long edges,
barycentre sweeps against crossings. Dummies are shared by all edges that carry one value, and a
value that many ranks read is drawn as a short stub at each use instead of as one long edge. The
horizontal coordinates of a rank are the exact least-squares solution under the minimum distances
(pool adjacent violators). All steps are linear in boxes and edges, but for sorting.

Nothing here knows of graphs of operators: boxes are numbers with a size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxkit.view.drawings.coordinates import coordinates, straighten
from fxkit.view.drawings.ranks import Vertices, order_ranks

Point = tuple[float, float]

_GAP_RANKS = 30.0
_TALL = 150.0
_STUB_USES, _STUB_SPAN = 4, 3
_MAX_DUMMIES_PER_BOX = 4


@dataclass(frozen=True, slots=True)
class Link:
    """An edge between two boxes; edges of the same `source` and `exit` carry the same value.

    Attributes:
        source: Box where it starts.
        target: Box where it ends; greater than `source`.
        exit: Where on the lower side it leaves, from the middle of `source`.
        entry: Where on the upper side it arrives, from the middle of `target`; None to spread
            the arrivals evenly.
    """

    source: int
    target: int
    exit: float = 0.0
    entry: float | None = None


@dataclass(frozen=True, slots=True)
class Stub:
    """A label that stands for a long edge at one of its ends.

    Attributes:
        source: Box whose value it names.
        exit: As in the links that it stands for.
        x: Middle of the label.
        y: Upper side of the label.
        at_source: Whether it hangs below the source or stands above a use.
        uses: How many links the source's value has.
    """

    source: int
    exit: float
    x: float
    y: float
    at_source: bool
    uses: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything went.

    Attributes:
        x: Middle of each box.
        y: Upper side of each box.
        width: Of the whole, from 0.
        height: Of the whole, from 0.
        routes: For each link the points that it passes, vertical where two share their x; None for
            a link that stubs stand for.
        stubs: The labels at the ends of links without a route.
        stub_routes: The short lines between stubs and boxes, downwards, with whether the line
            ends at a box.
    """

    x: list[float]
    y: list[float]
    width: float
    height: float
    routes: list[list[Point] | None]
    stubs: list[Stub]
    stub_routes: list[tuple[list[Point], int | None]]


def place(
    sizes: Sequence[tuple[float, float]],
    links: Sequence[Link],
    *,
    top: int = 0,
    bottom: int = 0,
    stub_size: Callable[[int, float, int], tuple[float, float]] | None = None,
) -> Placement:
    """Place boxes in ranks from top to bottom.

    Args:
        sizes: Width and height of each box, in an order in which links run forward.
        links: The edges.
        top: How many of the first boxes are pinned to the first rank, alone.
        bottom: How many of the last boxes are pinned to the last rank, alone.
        stub_size: Width and height of the label for a source, an exit and the number of uses,
            0 for the label at a use; without it no edge is cut.
    """
    count = len(sizes)
    tall = [height > _TALL for _, height in sizes]
    ranks = _ranks(tall, links, top, bottom)
    cut = _cut_values(count, links, ranks) if stub_size is not None else set()
    ranks = _make_room(ranks, links, cut)
    vertices = Vertices([w for w, _ in sizes], [h for _, h in sizes], ranks[:], [False] * count)
    vertices.above = [[] for _ in range(count)]
    vertices.below = [[] for _ in range(count)]
    entries = _entries(sizes, links)
    stubs = _add_stubs(vertices, links, entries, cut, stub_size) if stub_size else []
    chains = _add_dummies(vertices, links, entries, cut)
    order = order_ranks(vertices)
    x = coordinates(vertices, order)
    straighten(vertices, order, x, chains.values())
    entries = _sorted_entries(sizes, links, entries, chains, x, cut)
    return _finish(vertices, order, x, links, entries, chains, stubs, count)


def _ranks(tall: list[bool], links: Sequence[Link], top: int, bottom: int) -> list[int]:
    """Longest path from the sources; then sources and tall boxes move down to their first use.

    A tall box stretches its whole rank, so it stands beside as few others as it can.
    """
    count = len(tall)
    ranks = [0] * count
    below: list[list[int]] = [[] for _ in range(count)]
    has_source = [False] * count
    for link in links:
        below[link.source].append(link.target)
        has_source[link.target] = True
    for box in range(count):
        floor = 1 if top and box >= top else 0
        ranks[box] = max(ranks[box], floor)
        for target in below[box]:
            ranks[target] = max(ranks[target], ranks[box] + 1)
    for box in range(count - 1, top - 1, -1):
        if below[box] and (tall[box] or not has_source[box]):
            ranks[box] = min(ranks[target] for target in below[box]) - 1
    if bottom:
        last = max(ranks[: count - bottom], default=-1) + 1
        ranks[count - bottom :] = [last] * bottom
    return ranks


def _cut_values(count: int, links: Sequence[Link], ranks: list[int]) -> set[tuple[int, float]]:
    """Choose the values that are drawn as stubs: many uses, far apart; then the longest ones."""
    targets: dict[tuple[int, float], list[int]] = {}
    for link in links:
        targets.setdefault((link.source, link.exit), []).append(ranks[link.target])
    cut: set[tuple[int, float]] = set()
    lengths: list[tuple[int, tuple[int, float]]] = []
    dummies = 0
    for value, uses in targets.items():
        length = max(uses) - ranks[value[0]] - 1
        if len(uses) >= _STUB_USES and len(set(uses)) >= _STUB_SPAN and length >= _STUB_SPAN:
            cut.add(value)
        elif length > 0:
            dummies += length
            lengths.append((length, value))
    allowed = min(_MAX_DUMMIES_PER_BOX * count + 200, max(count, 20_000))
    for length, value in sorted(lengths, reverse=True):
        if dummies <= allowed:
            break
        cut.add(value)
        dummies -= length
    return cut


def _make_room(ranks: list[int], links: Sequence[Link], cut: set[tuple[int, float]]) -> list[int]:
    """Put an empty rank above each use of a cut value, and below its source, for the stubs."""
    slots = {ranks[link.target] for link in links if (link.source, link.exit) in cut}
    slots |= {ranks[source] + 1 for source, _ in cut}
    shift, shifts = 0, []
    for rank in range(max(ranks, default=-1) + 1):
        shift += rank in slots
        shifts.append(shift)
    return [rank + shifts[rank] for rank in ranks]


def _entries(sizes: Sequence[tuple[float, float]], links: Sequence[Link]) -> list[float]:
    """First guess where links arrive: in the order they are given."""
    arriving: dict[int, list[int]] = {}
    for i, link in enumerate(links):
        if link.entry is None:
            arriving.setdefault(link.target, []).append(i)
    entries = [link.entry or 0.0 for link in links]
    for target, indices in arriving.items():
        for index, offset in zip(indices, _spread(len(indices), sizes[target][0]), strict=True):
            entries[index] = offset
    return entries


def _spread(count: int, width: float) -> list[float]:
    step = min(22.0, max(0.0, width - 20) / count)
    return [(i - (count - 1) / 2) * step for i in range(count)]


_StubVertex = tuple[int, int, float, bool, int, int | None]


def _add_stubs(
    vertices: Vertices,
    links: Sequence[Link],
    entries: list[float],
    cut: set[tuple[int, float]],
    stub_size: Callable[[int, float, int], tuple[float, float]],
) -> list[_StubVertex]:
    """Add a label above each use of a cut value, and one below its source."""
    uses: dict[tuple[int, float], int] = {}
    for link in links:
        uses[link.source, link.exit] = uses.get((link.source, link.exit), 0) + 1
    made: list[_StubVertex] = []
    for i, link in enumerate(links):
        value = (link.source, link.exit)
        if value in cut:
            vertex = vertices.add(*stub_size(*value, 0), vertices.rank[link.target] - 1)
            vertices.join(vertex, 0.0, link.target, entries[i])
            made.append((vertex, link.source, link.exit, False, uses[value], i))
    for source, exit_ in sorted(cut):
        vertex = vertices.add(
            *stub_size(source, exit_, uses[source, exit_]), vertices.rank[source] + 1
        )
        vertices.join(source, exit_, vertex, 0.0)
        made.append((vertex, source, exit_, True, uses[source, exit_], None))
    return made


def _add_dummies(
    vertices: Vertices,
    links: Sequence[Link],
    entries: list[float],
    cut: set[tuple[int, float]],
) -> dict[tuple[int, float], list[int]]:
    """Add one vertex a rank for each value that reaches beyond the next rank; join all."""
    chains: dict[tuple[int, float], list[int]] = {}
    for i, link in enumerate(links):
        value = (link.source, link.exit)
        if value in cut:
            continue
        chain = chains.setdefault(value, [])
        start = vertices.rank[link.source]
        for rank in range(start + 1 + len(chain), vertices.rank[link.target]):
            vertex = vertices.add(2.0, 0.0, rank, is_dummy=True)
            previous, offset = (chain[-1], 0.0) if chain else (link.source, link.exit)
            vertices.join(previous, offset, vertex, 0.0)
            chain.append(vertex)
        steps = vertices.rank[link.target] - start - 1
        previous, offset = (chain[steps - 1], 0.0) if steps else (link.source, link.exit)
        vertices.join(previous, offset, link.target, entries[i])
    return chains


def _sorted_entries(
    sizes: Sequence[tuple[float, float]],
    links: Sequence[Link],
    entries: list[float],
    chains: dict[tuple[int, float], list[int]],
    x: list[float],
    cut: set[tuple[int, float]],
) -> list[float]:
    """Spread the arrivals at each box in the order of where they come from, so that none cross."""
    arriving: dict[int, list[tuple[float, int]]] = {}
    for i, link in enumerate(links):
        if link.entry is not None:
            continue
        value = (link.source, link.exit)
        chain = chains.get(value, [])
        origin = x[chain[-1]] if chain else x[link.source] + link.exit
        if value in cut:
            origin = x[link.target] + entries[i]
        arriving.setdefault(link.target, []).append((origin, i))
    result = entries[:]
    for target, origins in arriving.items():
        offsets = _spread(len(origins), sizes[target][0])
        for (_, index), offset in zip(sorted(origins), offsets, strict=True):
            result[index] = offset
    return result


def _finish(
    vertices: Vertices,
    order: list[list[int]],
    x: list[float],
    links: Sequence[Link],
    entries: list[float],
    chains: dict[tuple[int, float], list[int]],
    stubs: list[_StubVertex],
    count: int,
) -> Placement:
    tops, heights = _rank_heights(vertices, order, x)
    left = min((x[v] - vertices.width[v] / 2 for v in range(len(x))), default=0.0)
    x = [value - left for value in x]
    y = [
        tops[rank] + (heights[rank] - height) / 2
        for rank, height in zip(vertices.rank, vertices.height, strict=True)
    ]
    width = max((x[v] + vertices.width[v] / 2 for v in range(len(x))), default=0.0)
    drawing = _Router(vertices, x, y, tops, heights)
    stub_values = {(stub[1], stub[2]) for stub in stubs}
    routes = [
        None
        if (link.source, link.exit) in stub_values
        else drawing.route(link, entries[i], chains.get((link.source, link.exit), []))
        for i, link in enumerate(links)
    ]
    made, stub_routes = [], []
    for vertex, source, exit_, at_source, uses, index in stubs:
        made.append(Stub(source, exit_, x[vertex], y[vertex], at_source, uses))
        if index is None:
            stub_routes.append((drawing.join(source, exit_, vertex, 0.0), None))
        else:
            target = links[index].target
            stub_routes.append((drawing.join(vertex, 0.0, target, entries[index]), target))
    height = tops[-1] + heights[-1] if tops else 0.0
    return Placement(x[:count], y[:count], width, height, routes, made, stub_routes)


def _rank_heights(
    vertices: Vertices, order: list[list[int]], x: list[float]
) -> tuple[list[float], list[float]]:
    tops: list[float] = []
    heights: list[float] = []
    y = 0.0
    for row in order:
        tops.append(y)
        heights.append(max((vertices.height[v] for v in row), default=0.0))
        reach = max(
            (abs(x[o] + e - x[v] - s) for v in row for o, s, e in vertices.below[v]), default=0.0
        )
        y += heights[-1] + _GAP_RANKS + min(36.0, reach * 0.06)
    return tops, heights


@dataclass(frozen=True, slots=True)
class _Router:
    """Turns placed vertices into the points that links pass."""

    vertices: Vertices
    x: list[float]
    y: list[float]
    tops: list[float]
    heights: list[float]

    def route(self, link: Link, entry: float, chain: list[int]) -> list[Point]:
        """Return the points of one link; sideways moves happen only between two ranks."""
        points = self._leave(link.source, link.exit)
        steps = self.vertices.rank[link.target] - self.vertices.rank[link.source] - 1
        for vertex in chain[:steps]:
            rank = self.vertices.rank[vertex]
            points.append((self.x[vertex], self.tops[rank]))
            points.append((self.x[vertex], self.tops[rank] + self.heights[rank]))
        return [*points, *self._arrive(link.target, entry)]

    def join(self, upper: int, exit_: float, lower: int, entry: float) -> list[Point]:
        """Return the points between two vertices of neighbouring ranks."""
        return [*self._leave(upper, exit_), *self._arrive(lower, entry)]

    def _leave(self, vertex: int, exit_: float) -> list[Point]:
        rank = self.vertices.rank[vertex]
        x = self.x[vertex] + exit_
        return [
            (x, self.y[vertex] + self.vertices.height[vertex]),
            (x, self.tops[rank] + self.heights[rank]),
        ]

    def _arrive(self, vertex: int, entry: float) -> list[Point]:
        x = self.x[vertex] + entry
        return [(x, self.tops[self.vertices.rank[vertex]]), (x, self.y[vertex])]
