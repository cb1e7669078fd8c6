"""What a drawing is made of: boxes, frames, lines and labels, with coordinates in pixels.

Sizes of texts are computed from the advance of fixed-width fonts, with some room, since no font can
be asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxkit.view.drawings.layout import Point

CHARACTER, SMALL_CHARACTER = 7.35, 6.45
"""Width in pixels of one column of the large (12 px) and the small (10.5 px) fixed-width font."""


@dataclass(frozen=True, slots=True)
class Box:
    """A node, or a module that is not opened.

    Attributes:
        x: Left side.
        y: Upper side.
        width: To the right.
        height: Downwards.
        name: Name of the node; path of the module.
        title: The words in front, in bold.
        note: Words behind the title.
        detail: The second line.
        family: One of `fxkit.view.texts.labels.FAMILIES`.
        path: Qualified name of the module around it, or its own.
        is_module: Whether it stands for a module with several nodes.
        nodes: Number of nodes that it stands for.
        source: The user's line.
        operator: Identity of the operator; class of a module.
        frame: Index of the innermost frame around it; -1 for none.
        members: Names of the nodes that it stands for.
    """

    x: float
    y: float
    width: float
    height: float
    name: str
    title: str
    note: str
    detail: str
    family: str
    path: str
    is_module: bool
    nodes: int
    source: str
    operator: str
    frame: int
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleFrame:
    """An opened module.

    Attributes:
        x: Left side.
        y: Upper side.
        width: To the right.
        height: Downwards.
        title: Name of the module, with how often it is repeated.
        kind: Name of its class.
        path: Qualified name.
        depth: Number of frames around it.
        repeats: How many like modules it stands for.
        title_x: Left end of the title.
        frame: Index of the frame around it; -1 for none.
    """

    x: float
    y: float
    width: float
    height: float
    title: str
    kind: str
    path: str
    depth: int
    repeats: int
    title_x: float
    frame: int


@dataclass(frozen=True, slots=True)
class Line:
    """A value on its way from the node that makes it to one that reads it, or a part of that way.

    Attributes:
        points: Vertical between two points with the same x, curved else.
        value: Name of the node that makes the value.
        target: Name of the box it ends at, with an arrow; "" where it goes on.
    """

    points: tuple[Point, ...]
    value: str
    target: str


@dataclass(frozen=True, slots=True)
class Tag:
    """A label that stands for a long line.

    Attributes:
        x: Left side.
        y: Upper side.
        width: To the right.
        height: Downwards.
        text: What it says.
        value: Name of the node that makes the value.
        at_source: Whether it hangs at the node that makes the value, or stands at a use.
    """

    x: float
    y: float
    width: float
    height: float
    text: str
    value: str
    at_source: bool


@dataclass(slots=True)
class Scene:
    """All that is drawn, in pixels from the upper left corner.

    Attributes:
        width: Of the whole.
        height: Of the whole.
        boxes: Nodes and closed modules.
        frames: Opened modules, outer ones first.
        lines: The ways of values.
        tags: What stands for lines that would be long.
        shown_as: For each node, those in closed and folded modules included, the box it is in.
    """

    width: float = 0.0
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    frames: list[ModuleFrame] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    shown_as: dict[str, str] = field(default_factory=dict)
