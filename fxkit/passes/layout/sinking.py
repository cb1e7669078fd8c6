"""Move what only rearranges or recasts a tensor behind the operators that let it pass.

A mover (a transpose, a cast) at the entry of a region of operators that carry it is taken out, and
so is each mover at an exit that undoes it. Where something else enters the region, or leaves it,
a mover is put in. The whole is done where that takes more movers out than it puts in.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import fx

from fxkit.analysis.retyping import Retyping
from fxkit.ir.session import EditSession
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import type_of
from fxkit.passes.base import PassContext
from fxkit.passes.layout.sharing import MemorySharing
from fxkit.torch_adapters.fx_nodes import is_erased, order_key


@dataclass
class SinkRegion:
    """Operators that can be computed before a mover instead of behind it.

    Attributes:
        key: What the mover does.
        entries: The movers in front of it → what they take.
        nodes: The operators, in the order in which they were found.
        strangers: Operands that nothing has moved.
        exits: Movers behind it that undo what the entries do.
        open_nodes: Operators whose result is used outside by others than the exits.
    """

    key: Hashable
    entries: dict[fx.Node, fx.Node] = field(default_factory=dict)
    nodes: dict[fx.Node, None] = field(default_factory=dict)
    strangers: dict[fx.Node, None] = field(default_factory=dict)
    exits: list[fx.Node] = field(default_factory=list)
    open_nodes: list[fx.Node] = field(default_factory=list)

    @property
    def gain(self) -> int:
        """How many movers fewer there are when the region goes in front of them."""
        taken = sum(all(u in self.nodes for u in entry.users) for entry in self.entries)
        return taken + len(self.exits) - len(self.strangers) - len(self.open_nodes)


class Sinker(abc.ABC):
    """Finds regions and turns them; what a mover is, a subclass tells.

    Args:
        edit: The session.
        context: Where notes are left.
        by: Name of the pass.
    """

    def __init__(self, edit: EditSession, context: PassContext, by: str) -> None:
        self.edit = edit
        self.context = context
        self.by = by
        self.sharing = MemorySharing(edit.graph)
        self._tried: set[tuple[fx.Node, Hashable]] = set()

    @abc.abstractmethod
    def moved(self, node: fx.Node) -> tuple[fx.Node, Hashable] | None:
        """Return what a mover takes and what it does to it; None for a node that is none."""

    @abc.abstractmethod
    def undoes(self, node: fx.Node, key: Hashable) -> bool:
        """Tell whether a mover brings back what was in front of another."""

    @abc.abstractmethod
    def carries(self, node: fx.Node, key: Hashable) -> bool:
        """Tell whether a mover may go from the operands of a node to its result."""

    @abc.abstractmethod
    def is_neutral(self, operand: fx.Node, user: fx.Node, key: Hashable) -> bool:
        """Tell whether an operand that nothing has moved serves in front of the mover too."""

    @abc.abstractmethod
    def unmove(self, operand: fx.Node, user: fx.Node, key: Hashable) -> fx.Node | None:
        """Insert an operand as it is in front of the mover, if that can be."""

    @abc.abstractmethod
    def move(self, value: fx.Node, key: Hashable, place: fx.Node) -> fx.Node:
        """Insert a mover."""

    def objection(self, region: SinkRegion) -> str | None:
        """Say why a region may not be turned, although that would pay."""
        return None

    def run(self) -> None:
        """Visit the movers in order, and again as long as any of them goes.

        Cost: linear in the edges for each kind of mover and each round; what a round moves makes
        room for the next, of which there is seldom a third.
        """
        while self._round():
            self._tried.clear()

    def _round(self) -> bool:
        turned = False
        for node in list(self.edit.graph.nodes):
            found = None if is_erased(node) else self.moved(node)
            if found is not None and (node, found[1]) not in self._tried:
                turned |= self._visit(node, found[1])
        return turned

    def _visit(self, start: fx.Node, key: Hashable) -> bool:
        region = self._grow(start, key)
        if not region.nodes or region.gain < 1:
            return False
        reason = self.objection(region)
        if reason is None:
            mark, types = self.edit.mark(), Retyping()
            reason = self._turn(region, types)
            if reason is not None:
                self.edit.undo(mark)
                types.restore()
        if reason is not None:
            self.context.notes.append(f"%{start.name} stays where it is: {reason}")
        return reason is None

    def _grow(self, start: fx.Node, key: Hashable) -> SinkRegion:
        region = SinkRegion(key)
        self._enter(region, start)
        stack = list(start.users)
        while stack:
            node = stack.pop()
            if node in region.nodes or not self.carries(node, key) or self.sharing.is_written(node):
                continue
            region.nodes[node] = None
            stack.extend(node.users)
            for operand in node.all_input_nodes:
                if operand not in region.entries and self._enter(region, operand):
                    stack.extend(operand.users)
        for node in region.nodes:
            self._look_around(region, node)
        return region

    def _enter(self, region: SinkRegion, node: fx.Node) -> bool:
        found = self.moved(node)
        if found is None or found[1] != region.key:
            return False
        region.entries[node] = found[0]
        self._tried.add((node, region.key))
        return True

    def _look_around(self, region: SinkRegion, node: fx.Node) -> None:
        known = (region.nodes, region.entries)
        for operand in node.all_input_nodes:
            if any(operand in some for some in known):
                continue
            if not self.is_neutral(operand, node, region.key):
                region.strangers[operand] = None
        outside = [user for user in node.users if user not in region.nodes]
        exits = [
            user
            for user in outside
            if self.undoes(user, region.key) and not self.sharing.is_written(user)
        ]
        region.exits.extend(exits)
        if len(exits) < len(outside):
            region.open_nodes.append(node)

    def _turn(self, region: SinkRegion, types: Retyping) -> str | None:
        """Compute a region in front of its movers; say why that can't be."""
        made: dict[fx.Node, fx.Node] = {}
        ordered = sorted(region.nodes, key=order_key)
        for node in ordered:
            operands = dict.fromkeys(node.all_input_nodes)
            for operand in operands:
                operands[operand] = self._operand(region, operand, node, made)
            if None in operands.values():
                return f"%{node.name} takes what can't be moved"
            with self.edit.on_behalf_of([node], self.by):
                made[node] = self.edit.copy(node, operands.__getitem__, before=node)
            made[node].meta.pop(TYPE_KEY, None)
            self.sharing.add(made[node])
        reason = types.propagate(made.values())
        if reason is not None:
            return reason
        changed = self._connect(region, ordered, made)
        for node in (*reversed(ordered), *region.entries):
            if not node.users:
                self.edit.erase(node)
        return types.propagate(changed)

    def _operand(
        self, region: SinkRegion, operand: fx.Node, user: fx.Node, made: dict[fx.Node, fx.Node]
    ) -> fx.Node | None:
        if operand in made:
            return made[operand]
        if operand in region.entries:
            return region.entries[operand]
        if operand not in region.strangers:
            return operand
        with self.edit.on_behalf_of([user], self.by):
            return self.unmove(operand, user, region.key)

    def _connect(
        self, region: SinkRegion, ordered: list[fx.Node], made: dict[fx.Node, fx.Node]
    ) -> list[fx.Node]:
        """Let what is outside of a region use what was made; return nodes whose types to check."""
        changed: list[fx.Node] = []
        exits = set(region.exits)
        for node in ordered:
            for user in [user for user in node.users if user in exits]:
                if type_of(made[node]) != type_of(user):
                    changed.extend(user.users)
                self.edit.replace_uses(user, made[node])
                self.sharing.join(made[node], user)
                self.edit.erase(user)
            outside = [user for user in node.users if user not in region.nodes]
            if not outside:
                continue
            with self.edit.on_behalf_of([node], self.by):
                again = self.move(made[node], region.key, node)
            self.sharing.join(self.sharing.add(again), node)
            self.edit.replace_uses(node, again, where=lambda user: user not in region.nodes)
            changed.append(again)
        return [node for node in changed if not is_erased(node)]
