"""A drawing as boxes, frames and lines with coordinates, from a hierarchy of groups.

Each opened group is laid out by itself and then is one box of its parent's layout; values cross its
frame at ports, so that a line goes on inside where it ended outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import fx

from fxkit.view.drawings.hierarchy import Hierarchy, Leaf, ModuleGroup, stands_for
from fxkit.view.drawings.layout import Link, Placement, Point, place
from fxkit.view.drawings.shapes import (
    CHARACTER,
    SMALL_CHARACTER,
    Box,
    Line,
    ModuleFrame,
    Scene,
    Tag,
)
from fxkit.view.texts.labels import clip, columns, one_line
from fxkit.view.texts.text_table import plural, quantity

_BOX_PAD, _MARGIN, _FRAME_PAD, _FRAME_HEAD = 12.0, 24.0, 16.0, 30.0
_STUB_HEIGHT, _STUB_TEXT, _NOTE_LENGTH, _NAME_LENGTH = 18.0, 30, 26, 42
_EXITS = 12


def build_scene(hierarchy: Hierarchy, opened: set[ModuleGroup]) -> Scene:
    """Lay out a hierarchy.

    Args:
        hierarchy: The groups of a graph.
        opened: The groups whose insides are shown; a group in a closed one is not looked at.
    """
    scene = Scene()
    root = hierarchy.root
    level = _Level(_Subject(hierarchy, opened), root, [list(_nodes(root))])
    level.emit(scene, _MARGIN, _MARGIN, 0, -1)
    scene.width = level.width + 2 * _MARGIN
    scene.height = level.height + 2 * _MARGIN
    return scene


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is laid out.

    Attributes:
        hierarchy: The groups of a graph.
        opened: The groups whose insides are shown.
        placements: What was placed before: layers that are alike are placed once.
    """

    hierarchy: Hierarchy
    opened: set[ModuleGroup]
    placements: dict[Any, Placement] = field(default_factory=dict)

    def place(self, level: _Level, sizes: list[tuple[float, float]]) -> Placement:
        """Place the items of a level; labels depend on names, so levels with some are not kept."""
        tops, bottoms = level.sides
        key = (tuple(sizes), tuple(level.links), tops, bottoms)
        if key in self.placements:
            return self.placements[key]
        placed = place(sizes, level.links, top=tops, bottom=bottoms, stub_size=level.stub_size)
        if not placed.stubs:
            self.placements[key] = placed
        return placed


class _Level:
    """The inside of one opened group.

    Args:
        subject: What is laid out.
        group: The group.
        copies: The nodes of the group, then, in the same order, those of each group that it stands
            for.

    Attributes:
        width: Of the inside, without the frame.
        height: Of the inside, without the frame.
        inputs: For each value that comes from outside where it enters, from the left.
        outputs: For each value that is read outside where it leaves, from the left.
        links: The edges, by position of the items behind the inputs.
        sides: How many values come from outside, and how many are read there.
    """

    def __init__(self, subject: _Subject, group: ModuleGroup, copies: _Copies) -> None:
        self.group = group
        self._hierarchy = subject.hierarchy
        self._copies = copies
        self._items: list[_Item] = []
        start = 0
        for item in group.items:
            end = start + sum(len(member) for member in _members(item))
            self._items.append(_item(subject, item, [copy[start:end] for copy in copies]))
            start = end
        self._values: list[fx.Node] = []
        self.links, top, bottom = self._connect()
        self.sides = len(top), len(bottom)
        self._tops = len(top)
        sizes = [(4.0, 0.0)] * len(top)
        sizes += [(item.width, item.height) for item in self._items]
        sizes += [(4.0, 0.0)] * len(bottom)
        self._origin = {
            (link.source, link.exit): value
            for link, value in zip(self.links, self._values, strict=True)
        }
        self._placed = subject.place(self, sizes)
        x = self._placed.x
        self.inputs = {value: x[i] for i, value in enumerate(top)}
        first = len(top) + len(self._items)
        self.outputs = {value: x[first + i] for i, value in enumerate(bottom)}
        self.width, self.height = self._placed.width, self._placed.height

    def _connect(self) -> tuple[list[Link], list[fx.Node], list[fx.Node]]:
        """Return the links of this level, with the values at its upper and its lower side."""
        owner: dict[fx.Node, int] = {}
        stand_in: dict[fx.Node, fx.Node] = {}
        for index, item in enumerate(self._items):
            for member in item.members:
                for node, shown in zip(member, item.nodes, strict=True):
                    owner[node] = index
                    stand_in[node] = shown
        wanted: dict[tuple[fx.Node, int, fx.Node], None] = {}
        operands, users = self._hierarchy.operands, self._hierarchy.users
        top: dict[fx.Node, int] = {}
        leaving = _leaving(self._copies, users)
        bottom = {node: i for i, node in enumerate(leaving)}
        for node, index in owner.items():
            for value, port in zip(operands[node], operands[stand_in[node]], strict=False):
                if owner.get(value) == index:
                    continue
                if value not in owner:
                    top.setdefault(value, len(top))
                wanted[value, index, port] = None
        links: dict[Link, fx.Node] = {}
        for value, index, port in wanted:
            entry = self._items[index].entry(port)
            if value in owner:
                source, exit_ = len(top) + owner[value], self._exit(owner, stand_in, value)
            else:
                source, exit_ = top[value], 0.0
            links[Link(source, len(top) + index, exit_, entry)] = value
        below = len(top) + len(self._items)
        for value, position in bottom.items():
            source, exit_ = len(top) + owner[value], self._exit(owner, stand_in, value)
            links[Link(source, below + position, exit_, 0.0)] = value
        self._values = list(links.values())
        return list(links), list(top), list(bottom)

    def _exit(
        self, owner: dict[fx.Node, int], stand_in: dict[fx.Node, fx.Node], value: fx.Node
    ) -> float:
        return self._items[owner[value]].exit(stand_in[value])

    def stub_size(self, source: int, exit_: float, uses: int) -> tuple[float, float]:
        """Return width and height of the label that stands for a value."""
        text = self._stub_text(source, exit_, uses)
        return ((columns(text) + 2) * SMALL_CHARACTER + 18, _STUB_HEIGHT)

    def _stub_text(self, source: int, exit_: float, uses: int) -> str:
        value = self._origin[source, exit_]
        inside = 0 <= source - self._tops < len(self._items)
        name = self._items[source - self._tops].exit_name(value) if inside else value.name
        text = clip(one_line(name), _STUB_TEXT)
        return f"{text} ×{uses}" if uses else text

    def emit(self, scene: Scene, x: float, y: float, depth: int, frame: int) -> None:
        """Add boxes, frames and lines to the scene, with this level's corner at (x, y)."""
        placed = self._placed
        for i, item in enumerate(self._items):
            left = x + placed.x[self._tops + i] - item.width / 2
            item.emit(scene, left, y + placed.y[self._tops + i], depth, frame, self.group.path)
        for link, value, route in zip(self.links, self._values, placed.routes, strict=True):
            if route is not None:
                scene.lines.append(self._line(route, value, link.target, x, y))
        for stub in placed.stubs:
            value = self._origin[stub.source, stub.exit]
            uses = stub.uses if stub.at_source else 0
            width, height = self.stub_size(stub.source, stub.exit, uses)
            text = self._stub_text(stub.source, stub.exit, uses)
            left = x + stub.x - width / 2
            scene.tags.append(
                Tag(left, y + stub.y, width, height, text, value.name, stub.at_source)
            )
        for i, (route, target) in enumerate(placed.stub_routes):
            stub = placed.stubs[i]
            value = self._origin[stub.source, stub.exit]
            scene.lines.append(self._line(route, value, target, x, y))

    def _line(
        self, route: list[Point], value: fx.Node, target: int | None, x: float, y: float
    ) -> Line:
        moved = tuple((x + px, y + py) for px, py in route)
        index = -1 if target is None else target - self._tops
        inside = 0 <= index < len(self._items)
        name = self._items[index].arrow_name if inside else ""
        return Line(moved, value.name, name)


class _LeafItem:
    """A node, or a module that is drawn as one box."""

    def __init__(self, hierarchy: Hierarchy, item: Leaf | ModuleGroup, copies: _Copies) -> None:
        self.leaf = item.only if isinstance(item, ModuleGroup) else item
        self.group = item if isinstance(item, ModuleGroup) else None
        self.members = _members(item)
        self.nodes = self.members[0]
        self.title, self.note, self.detail = _words(item)
        self.detail = clip(self.detail, _NAME_LENGTH)
        first = columns(self.title) + (columns(self.note) + 2 if self.note else 0)
        longest = max(first * CHARACTER, columns(self.detail) * SMALL_CHARACTER)
        self.width = max(longest + 2 * _BOX_PAD, 56.0)
        self.height = 40.0 if self.detail else 28.0
        outside = _leaving(copies, hierarchy.users)
        self._is_bundle = len(outside) > _EXITS
        spread = [] if self._is_bundle else outside
        step = min(26.0, (self.width - 24) / max(len(spread), 1))
        self._exits = {node: (i - (len(spread) - 1) / 2) * step for i, node in enumerate(spread)}

    @property
    def arrow_name(self) -> str:
        if self.leaf is not None or self.group is None:
            return self.nodes[0].name
        return f"{self._path}#{self.group.call + 1}" if self.group.call else self._path

    @property
    def _kind(self) -> str:
        return self.group.kind if self.group else ""

    @property
    def _path(self) -> str:
        return self.group.path if self.group else ""

    def entry(self, _value: fx.Node) -> float | None:
        return None

    def exit(self, value: fx.Node) -> float:
        return self._exits.get(value, 0.0)

    def exit_name(self, value: fx.Node) -> str:
        """Return what a label says that stands for a value; many values leave as one."""
        return self.title if self._is_bundle else value.name

    def emit(self, scene: Scene, x: float, y: float, _depth: int, frame: int, around: str) -> None:
        label = self.leaf.label if self.leaf else None
        scene.boxes.append(
            Box(
                x=x,
                y=y,
                width=self.width,
                height=self.height,
                name=self.arrow_name,
                title=self.title,
                note=self.note,
                detail=self.detail,
                family=label.family if label else "other",
                path=self._path or around,
                is_module=label is None,
                nodes=sum(len(member) for member in self.members),
                source=str(label.source) if label and label.source else "",
                operator=label.operator if label else self._kind,
                frame=frame,
                members=tuple(node.name for member in self.members for node in member),
            )
        )
        scene.shown_as.update(
            {node.name: self.arrow_name for member in self.members for node in member}
        )


class _FrameItem:
    """A module that is opened."""

    def __init__(self, subject: _Subject, group: ModuleGroup, copies: _Copies) -> None:
        self.group = group
        self.level = _Level(subject, group, copies)
        self.members = _members(group)
        self.nodes = self.members[0]
        title = columns(clip(group.title, _NAME_LENGTH)) + columns(group.kind) + 3
        self._title_width = title * CHARACTER + 16
        self.width = max(self.level.width, self._title_width) + 2 * _FRAME_PAD
        self._left = (self.width - self.level.width) / 2
        self._title_left = self._find_room()
        self.height = self.level.height + _FRAME_HEAD + _FRAME_PAD

    @property
    def arrow_name(self) -> str:
        return ""

    def entry(self, value: fx.Node) -> float | None:
        return self._left + self.level.inputs[value] - self.width / 2

    def exit(self, value: fx.Node) -> float:
        return self._left + self.level.outputs[value] - self.width / 2

    def exit_name(self, value: fx.Node) -> str:
        return value.name

    def emit(self, scene: Scene, x: float, y: float, depth: int, frame: int, _around: str) -> None:
        group = self.group
        scene.frames.append(
            ModuleFrame(
                x=x,
                y=y,
                width=self.width,
                height=self.height,
                title=clip(one_line(group.title), _NAME_LENGTH),
                kind=group.kind,
                path=group.path,
                depth=depth,
                repeats=group.fold.count if group.fold else 1,
                title_x=x + self._title_left,
                frame=frame,
            )
        )
        bottom = y + self.height
        for value, dx in self.level.inputs.items():
            at = x + self._left + dx
            scene.lines.append(Line(((at, y), (at, y + _FRAME_HEAD)), value.name, ""))
        for value, dx in self.level.outputs.items():
            at = x + self._left + dx
            scene.lines.append(Line(((at, bottom - _FRAME_PAD), (at, bottom)), value.name, ""))
        here = len(scene.frames) - 1
        self.level.emit(scene, x + self._left, y + _FRAME_HEAD, depth + 1, here)
        for member in self.members[1:]:
            for node, shown in zip(member, self.nodes, strict=True):
                scene.shown_as[node.name] = scene.shown_as[shown.name]

    def _find_room(self) -> float:
        """Choose the left end of the title so that no line runs through it; widen if need be."""
        ports = sorted(self._left + dx for dx in self.level.inputs.values())
        edges = [0.0, *ports, self.width]
        for left, right in pairwise(edges):
            if right - left >= self._title_width + 12:
                return left + 12
        missing = self._title_width + 12 - (self.width - edges[-2])
        self.width += missing
        return edges[-2] + 12


_Item = _LeafItem | _FrameItem
_Copies = list[list[fx.Node]]


def _item(subject: _Subject, item: Leaf | ModuleGroup, around: _Copies) -> _Item:
    """Make an item, of its nodes in each copy of the group that it is in."""
    size = len(_members(item)[0])
    copies = [nodes[at : at + size] for nodes in around for at in range(0, len(nodes), size)]
    if isinstance(item, ModuleGroup) and item in subject.opened and item.only is None:
        return _FrameItem(subject, item, copies)
    return _LeafItem(subject.hierarchy, item, copies)


def _leaving(copies: _Copies, users: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    """Return the nodes of the first copy that, in it or in another, are read outside."""
    found: set[int] = set()
    for nodes in copies:
        inside = set(nodes)
        found.update(
            i for i, node in enumerate(nodes) if any(user not in inside for user in users[node])
        )
    return [copies[0][i] for i in sorted(found)]


def _members(item: Leaf | ModuleGroup) -> list[list[fx.Node]]:
    """Return the nodes of an item and, in the same order, those of each item folded into it."""
    if isinstance(item, Leaf):
        return [[item.node]]
    return [list(_nodes(group)) for group in (item, *(item.fold.members if item.fold else ()))]


def _nodes(group: ModuleGroup) -> Iterator[fx.Node]:
    """Iterate over all nodes, folded-away ones included, in one order for like groups."""
    for item in group.items:
        if isinstance(item, Leaf):
            yield item.node
            continue
        for member in (item, *(item.fold.members if item.fold else ())):
            yield from _nodes(member)


def _words(item: Leaf | ModuleGroup) -> tuple[str, str, str]:
    """Return title, note and second line of a box."""
    if isinstance(item, ModuleGroup):
        leaf = item.only
        if leaf is None:
            count = sum(map(stands_for, _nodes(item))) * (item.fold.count if item.fold else 1)
            size = f" · {quantity(item.parameters)} params" if item.parameters else ""
            kind = f"{item.kind} · " if item.kind else ""
            return clip(item.title, _NAME_LENGTH), "", f"{kind}{plural(count, 'node')}{size}"
        note = leaf.label.constants if leaf.label.family == "kernel" else one_line(item.title)
        return leaf.label.short, clip(note, _NOTE_LENGTH), leaf.label.type
    label = item.label
    if label.operator == "input":
        return clip(one_line(label.name), _NAME_LENGTH), "", label.type
    if label.operator == "constant":
        return clip(label.constants, _NAME_LENGTH), "", label.type
    note = clip(label.constants, _NOTE_LENGTH)
    return clip(one_line(label.short), _NAME_LENGTH), note, label.type
