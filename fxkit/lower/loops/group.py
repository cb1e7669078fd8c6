"""A region as it grows: what it computes, and where each of its values lies."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fxkit.lower.loops.loop_ir import Unfusable
from fxkit.lower.loops.placement import Candidate, place, place_alias
from fxkit.lower.loops.region_space import Coordinates, RegionSpace

# A kernel of more operators takes the compiler long and runs out of registers.
MAX_MEMBERS = 48


@dataclass
class Group:
    """A region as it grows.

    Attributes:
        space: Its iteration space.
        members: What it computes, in an order in which operands come first.
        aliases: Views of its values; they compute nothing.
        coordinates: Where each of its values lies.
        reads: Tensors from outside that it reads.
    """

    space: RegionSpace
    members: list[Candidate] = field(default_factory=list)
    aliases: dict[fx.Node, fx.Node] = field(default_factory=dict)
    coordinates: dict[fx.Node, Coordinates] = field(default_factory=dict)
    reads: set[fx.Node] = field(default_factory=set)

    def takes(self, found: Candidate, root: fx.GraphModule) -> bool:
        """Take a candidate in when it fits and has to do with the region."""
        tensors = {t for t in found.tensors if isinstance(t, fx.Node)}
        is_related = not self.members or any(
            t in self.coordinates or t in self.reads for t in tensors
        )
        if not is_related or len(self.members) >= MAX_MEMBERS:
            return False
        try:
            self.take(found, root)
        except Unfusable:
            return False
        return True

    def take(self, found: Candidate, root: fx.GraphModule) -> None:
        """Take a candidate in.

        Raises:
            Unfusable: When it does not fit into the region's space.
        """
        self.coordinates[found.node] = place(found, self.space, self.coordinates, root)
        self.members.append(found)
        tensors = (t for t in found.tensors if isinstance(t, fx.Node))
        self.reads.update(t for t in tensors if t not in self.coordinates)

    def takes_alias(self, node: fx.Node) -> bool:
        """Take a view of one of its values in, when a kernel can follow it."""
        try:
            source, coordinates = place_alias(node, self.space, self.coordinates)
        except Unfusable:
            return False
        self.aliases[node] = source
        self.coordinates[node] = coordinates
        return True
