"""What a sweep over a graph leaves for each node, and how it says that it has to begin again."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxkit.analysis.type_inference.type_modes import TypeModes


class NeedsLive(Exception):
    """Some nodes have to be run on live tensors, so the sweep has to begin again.

    Args:
        node: One that has to.
        about_data: Whether it is because the data decide a size or a number.
    """

    def __init__(self, node: fx.Node, about_data: bool = False) -> None:
        super().__init__(node.name)
        self.node = node
        self.about_data = about_data


class Record:
    """What a node was when it was visited, what came out, and the modes it ran in."""

    __slots__ = ("args", "kwargs", "modes", "target", "value")

    def __init__(self, node: fx.Node, value: Any, modes: TypeModes) -> None:
        self.args, self.kwargs, self.target = node.args, node.kwargs, node.target
        self.value = value
        self.modes = modes

    def fits(self, node: fx.Node) -> bool:
        """Tell whether the node is still what it was."""
        return self.args is node.args and self.kwargs is node.kwargs and self.target is node.target
