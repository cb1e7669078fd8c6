"""A region as it grows: what it computes, and where each of its values lies."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fxkit.ir.types import type_of
from fxkit.lower.loops.loop_ir import Unfusable
from fxkit.lower.loops.placement import Candidate, place, place_alias, position_taken
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
        coordinates: Where each of its values lies; of several results, the first.
        results: Where each result of each member lies.
        reads: Tensors from outside that it reads.
    """

    space: RegionSpace
    members: list[Candidate] = field(default_factory=list)
    aliases: dict[fx.Node, fx.Node] = field(default_factory=dict)
    coordinates: dict[fx.Node, Coordinates] = field(default_factory=dict)
    results: dict[fx.Node, tuple[Coordinates, ...]] = field(default_factory=dict)
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
        self.results[found.node] = place(found, self.space, self.coordinates, root)
        self.coordinates[found.node] = self.results[found.node][0]
        self.members.append(found)
        tensors = (t for t in found.tensors if isinstance(t, fx.Node))
        self.reads.update(t for t in tensors if t not in self.coordinates)

    def takes_alias(self, node: fx.Node) -> bool:
        """Take a view of one of its values in, when a kernel can follow it."""
        try:
            source, coordinates = place_alias(node, self.space, self.coordinates, self.results)
        except Unfusable:
            return False
        self.aliases[node] = source
        self.coordinates[node] = coordinates
        return True

    def origin(self, node: fx.Node) -> tuple[fx.Node, int]:
        """Follow views to the member whose result a value is, and say which of its results."""
        position = 0
        while node in self.aliases:
            source = self.aliases[node]
            if isinstance(type_of(source), tuple):
                position = position_taken(node) or 0
            node = source
        return node, position

    def outputs(self) -> list[tuple[fx.Node, int]]:
        """Return the results, each a member and a position, that are used outside the region."""
        needed: set[tuple[fx.Node, int]] = set()
        for node in self.coordinates:
            for user in node.users:
                if user in self.coordinates:
                    continue
                origin, position = self.origin(node)
                if node is origin and isinstance(type_of(node), tuple):
                    position = position_taken(user) or 0
                needed.add((origin, position))
        order = {m.node: place for place, m in enumerate(self.members)}
        return sorted(needed, key=lambda output: (order[output[0]], output[1]))
