"""A fusion group as it grows: its members, and the coordinates of its values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.fusion.candidates import Candidate, is_candidate, position_taken
from fxkit.lower.fusion.column_sums import place_sum
from fxkit.lower.fusion.placement import first_space, place, place_alias
from fxkit.lower.fusion.region_space import Coordinates, RegionSpace
from fxkit.lower.fusion.view_map import alias_source, is_alias, shown_by
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.movement_table import MoveOp
from fxkit.lower.operators.reduction_ops import ReductionOp

# A kernel of more operators or operands takes the compiler long and runs out of registers.
MAX_MEMBERS = 48
MAX_READS = 48


def _checks(found: Candidate) -> bool:
    """Tell whether eager raises for some values of a candidate's operands."""
    return found.entry.checks


@dataclass
class FusionGroup:
    """A region as it grows.

    Attributes:
        space: Its iteration space.
        members: What it computes, in an order in which operands come first.
        aliases: Views of its values; they compute nothing.
        coordinates: Where each of its values lies; of several results, the first. None for a value
            that has no place in the space: it is computed wherever others read it.
        results: Where each result of each member lies.
        reads: Tensors from outside that it reads.
        sources: What these are views of, or they themselves.
        sums: Members that sum over all rows. Nothing in the region reads them, and they have no
            place in the space.
        is_strict: Whether all its values must have a place.
        may_sum: Whether it may take in sums over all rows.
        rounds: Whether each result of 16 bits is rounded, not only what is stored.
    """

    space: RegionSpace
    members: list[Candidate] = field(default_factory=list)
    aliases: dict[fx.Node, fx.Node] = field(default_factory=dict)
    coordinates: dict[fx.Node, Coordinates | None] = field(default_factory=dict)
    results: dict[fx.Node, tuple[Coordinates, ...]] = field(default_factory=dict)
    reads: set[fx.Node] = field(default_factory=set)
    sources: set[fx.Node] = field(default_factory=set)
    sums: set[fx.Node] = field(default_factory=set)
    is_strict: bool = False
    may_sum: bool = False
    rounds: bool = True

    def try_add(self, found: Candidate) -> bool:
        """Take a candidate in when it fits and has to do with the region."""
        if len(self.members) >= MAX_MEMBERS or len(self.reads) >= MAX_READS:
            return False
        if self.members and not self._is_related(found):
            return False
        if any(t in self.sums for t in found.tensors):
            return False
        try:
            self.take(found)
        except Unfusable:
            return False
        return True

    def _is_related(self, found: Candidate) -> bool:
        """Tell whether a candidate shares an operand with the region, or a reader."""
        tensors = {t for t in found.tensors if isinstance(t, fx.Node)}
        if any(t in self.coordinates or shown_by(t) in self.sources for t in tensors):
            return True
        readers = (user for user in found.node.users if user.op != "output")
        return any(o in self.coordinates for user in readers for o in user.all_input_nodes)

    def take(self, found: Candidate) -> None:
        """Take a candidate in.

        Raises:
            Unfusable: When it does not fit into the region's space.
        """
        tensors = [t for t in found.tensors if isinstance(t, fx.Node)]
        if self.is_strict and isinstance(found.entry, MoveOp) and self.members:
            raise Unfusable("it moves elements in a region that keeps to one space")
        try:
            self._place(found)
        except Unfusable:
            if self.is_strict:
                raise
            if self._try_add_sum(found):
                self.sums.add(found.node)
            elif self._can_sum_over_rows(found):
                self._sum_over_rows(found)
            elif self._can_be_inlined(found):
                self.coordinates[found.node] = None
            elif self._can_move_to(found, tensors):
                self._move_to(found)
            else:
                raise
        self.members.append(found)
        outside = [t for t in tensors if t not in self.coordinates]
        self.reads.update(outside)
        self.sources.update(map(shown_by, outside))

    def _place(self, found: Candidate) -> None:
        self.results[found.node] = place(found, self.space, self.placed)
        self.coordinates[found.node] = self.results[found.node][0]

    def _try_add_sum(self, found: Candidate) -> bool:
        """Take in a sum over all rows, if it is one."""
        if not self.may_sum:
            return False
        try:
            self.results[found.node] = (place_sum(found, self.space, self.placed),)
        except Unfusable:
            return False
        return True

    def _can_sum_over_rows(self, found: Candidate) -> bool:
        """Tell whether what the region has reduced so far may be sums over all rows of another.

        All else that it computes must be as wide as its space.
        """
        reducing = self._reducing
        if (
            not self.may_sum
            or not reducing
            or self.sums
            or not isinstance(found.entry, ReductionOp)
        ):
            return False
        if any(member.entry.name != "aten.sum" for member in reducing.values()):
            return False
        seen = self._seen(reducing)
        others = {node: c for node, c in self.coordinates.items() if node not in seen}
        if any(user in others or user is found.node for node in seen for user in node.users):
            return False
        return all(c is not None and self.space.is_wide(c) for c in others.values())

    def _seen(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return some of its values, and the views of them that it has taken in."""
        found = set(nodes)
        return found | {alias for alias in self.aliases if self.origin(alias)[0] in found}

    @property
    def _reducing(self) -> dict[fx.Node, Candidate]:
        return {m.node: m for m in self.members if isinstance(m.entry, ReductionOp)}

    def _sum_over_rows(self, found: Candidate) -> None:
        """Reduce the rows that a candidate reduces; what was reduced is summed over all of them."""
        before = (self.space, dict(self.coordinates), dict(self.results))
        self.space = RegionSpace(self.space.sizes)
        sums = self._reducing
        for node in self._seen(sums):
            del self.coordinates[node]
        try:
            self._place(found)
            for node, member in sums.items():
                self.results[node] = (place_sum(member, self.space, self.placed),)
        except Unfusable:
            self.space, self.coordinates, self.results = before
            raise
        self.sums.update(sums)

    def _can_be_inlined(self, found: Candidate) -> bool:
        """Tell whether a candidate may be computed where others of the region will read it."""
        is_plain = not isinstance(found.entry, ReductionOp) and not _checks(found)
        return is_plain and self._leads_to(found.node, self.space.sizes)

    def _can_move_to(self, found: Candidate, tensors: Iterable[fx.Node]) -> bool:
        """Tell whether the region may go on in the space of a candidate.

        All that it has computed is then computed where the candidate and those after it read it.
        """
        if self.space.reduced is not None or any(map(_checks, self.members)):
            return False
        if not any(t in self.coordinates for t in tensors):
            return False
        shape = first_space(found).sizes
        return all(
            user is found.node or user in self.coordinates or self._leads(user, shape)
            for node in self.coordinates
            for user in node.users
        )

    def _move_to(self, found: Candidate) -> None:
        before = (self.space, dict(self.coordinates), dict(self.results))
        self.space = first_space(found)
        self.coordinates = dict.fromkeys(self.coordinates)
        self.results = {}
        try:
            self._place(found)
        except Unfusable:
            self.space, self.coordinates, self.results = before
            raise

    def _leads_to(self, node: fx.Node, shape: tuple[int, ...], depth: int = 6) -> bool:
        """Tell whether a value is only read on the way to values of a shape."""
        return bool(node.users) and all(
            user in self.coordinates or self._leads(user, shape, depth) for user in node.users
        )

    def _leads(self, user: fx.Node, shape: tuple[int, ...], depth: int = 6) -> bool:
        if not depth or not (is_alias(user) or is_candidate(user)):
            return False
        known = type_of(user)
        if isinstance(known, TensorType) and known.shape == shape and not is_alias(user):
            return True
        return self._leads_to(user, shape, depth - 1)

    def try_add_view(self, node: fx.Node) -> bool:
        """Take a view of one of its values in; a kernel that can't follow it is not made."""
        call = resolve(node)
        source = alias_source(call) if call else None
        if source is None or source not in self.coordinates:
            return False
        try:
            self.coordinates[node] = place_alias(node, self.space, self.placed, self.results)
        except Unfusable:
            if self.is_strict:
                return False
            self.coordinates[node] = None
        self.aliases[node] = source
        return True

    @property
    def placed(self) -> dict[fx.Node, Coordinates]:
        """The values that have a place in the space, with their coordinates."""
        return {node: c for node, c in self.coordinates.items() if c is not None}

    def computes(self, node: fx.Node) -> bool:
        """Tell whether it computes a node, or shows it as a view."""
        return node in self.coordinates or node in self.sums

    @property
    def nodes(self) -> list[fx.Node]:
        """All that it computes, and views, each after what it is a view of."""
        apart = [m.node for m in self.members if m.node in self.sums]
        return [*self.coordinates, *apart, *(a for a in self.aliases if a not in self.coordinates)]

    @property
    def is_simple(self) -> bool:
        """Whether each value is computed once, in its place."""
        has_moves = any(isinstance(m.entry, MoveOp) for m in self.members)
        return not has_moves and None not in self.coordinates.values()

    def origin(self, node: fx.Node) -> tuple[fx.Node, int]:
        """Follow views to the member whose result a value is, and say which of its results."""
        position = 0
        while node in self.aliases:
            source = self.aliases[node]
            if isinstance(type_of(source), tuple) and source not in self.aliases:
                position = position_taken(node) or 0
            node = source
        return node, position

    def outputs(self) -> list[tuple[fx.Node, int]]:
        """Return the results, each a member and a position, that are used outside the region."""
        needed: set[tuple[fx.Node, int]] = set()
        for node in (*self.coordinates, *self.sums):
            for user in node.users:
                if self.computes(user):
                    continue
                origin, position = self.origin(node)
                if node is origin and isinstance(type_of(node), tuple):
                    position = position_taken(user) or 0
                needed.add((origin, position))
        order = {m.node: place for place, m in enumerate(self.members)}
        return sorted(needed, key=lambda output: (order[output[0]], output[1]))
