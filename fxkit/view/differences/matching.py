"""Which nodes of two graphs are the same.

A node is the same as another by what a journal recorded; else by its name and its record of
rewrites; else, when rewrites recorded that others stand for it, it is replaced by them; else by its
name and operator; else by what it computes from nodes that are the same. Linear in both graphs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.journal import GraphChange
from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.op import resolve
from fxkit.ir.provenance import KEY, provenance_of
from fxkit.view.texts.labels import operator_name

_RENAMED = re.compile(r"%(?P<old>.+) -> %(?P<new>.+)")


class Matcher:
    """Finds which nodes of two graphs are the same.

    Args:
        old: The nodes before.
        new: The nodes after.
        journal: What was changed between the two, where that was recorded.

    Attributes:
        pairs: Node before → node after.
        back: Node after → node before.
        replaced: Nodes before, with the nodes after that stand for them.
        stands_for: For each replaced node those that stand for it.
    """

    def __init__(
        self, old: list[fx.Node], new: list[fx.Node], journal: Sequence[GraphChange] | None = None
    ) -> None:
        self._old = old
        self._new = new
        self._position = {node: i for i, node in enumerate(old)}
        self._position.update({node: i for i, node in enumerate(new)})
        self.pairs: dict[fx.Node, fx.Node] = {}
        self.back: dict[fx.Node, fx.Node] = {}
        self.replaced: list[tuple[list[fx.Node], list[fx.Node]]] = []
        recorded = None if journal is None else survivors(journal, [node.name for node in old])
        if recorded is not None:
            self._match_by_journal(recorded)
            self._match_by_provenance()
        else:
            self._match_by_record()
            self._match_by_provenance()
            self._match_by_name()
            self._match_inputs()
            self._match_by_structure()
        self.stands_for = {old: set(news) for olds, news in self.replaced for old in olds}

    def at(self, node: fx.Node) -> int:
        """Return the place of a node in its graph."""
        return self._position[node]

    def _pair(self, a: fx.Node, b: fx.Node) -> None:
        self.pairs[a] = b
        self.back[b] = a

    def _match_by_journal(self, recorded: dict[str, str]) -> None:
        by_name = {node.name: node for node in self._new}
        for node in self._old:
            other = by_name.get(recorded.get(node.name, ""))
            if other is not None:
                self._pair(node, other)

    def _match_by_record(self) -> None:
        """Join nodes of one name that no rewrite has made since: their records are equal."""
        by_name = {node.name: node for node in self._new}
        for node in self._old:
            other = by_name.get(node.name)
            if other is None or identity(node) != identity(other):
                continue
            if node.meta.get(KEY) == other.meta.get(KEY):
                self._pair(node, other)

    def _match_by_name(self) -> None:
        taken = self._taken()
        by_name = {node.name: node for node in self._new if node not in taken}
        for node in self._old:
            other = by_name.get(node.name)
            if node in self.pairs or node in taken or other is None or other in self.back:
                continue
            if identity(node) == identity(other):
                self._pair(node, other)

    def _match_by_provenance(self) -> None:
        """Join what is left by the original nodes that they say to stand for."""
        origin: dict[str, list[fx.Node]] = {}
        for node in self._old:
            if node not in self.pairs:
                for name in provenance_of(node).replaced:
                    origin.setdefault(name, []).append(node)
        groups = _Groups()
        for node in self._new:
            record = node.meta.get(KEY)
            if node not in self.back and record is not None:
                claimed = [old for name in record.replaced for old in origin.get(name, ())]
                groups.add(node, claimed)
        for olds, news in groups.found():
            self.replaced.append((sorted(olds, key=self.at), sorted(news, key=self.at)))

    def _match_inputs(self) -> None:
        """Join inputs that have other names by their order, when there are as many."""
        taken = self._taken()
        olds = [n for n in self._old if n.op == "placeholder" and n not in taken]
        news = [n for n in self._new if n.op == "placeholder" and n not in taken]
        if len(olds) == len(news):
            for a, b in zip(olds, news, strict=True):
                if a not in self.pairs and b not in self.back:
                    self._pair(a, b)

    def _match_by_structure(self) -> None:
        """Join what does the same to operands that are the same, in the order of the graphs."""
        taken = self._taken()
        waiting: dict[Any, list[fx.Node]] = {}
        for node in reversed(self._old):
            if node not in self.pairs and node not in taken:
                waiting.setdefault((identity(node), constants(node)), []).append(node)
        for node in self._new:
            if node in self.back or node in taken:
                continue
            wanted = [self.back.get(operand) for operand in operands(node)]
            candidates = waiting.get((identity(node), constants(node)), [])
            if None in wanted or not candidates:
                continue
            for other in self._candidates(wanted, candidates):
                if other not in self.pairs and other not in taken and operands(other) == wanted:
                    self._pair(other, node)
                    break

    def _candidates(
        self, wanted: Sequence[fx.Node | None], waiting: list[fx.Node]
    ) -> Iterable[fx.Node]:
        """Return the nodes that may do the same: users of the operand that has the fewest."""
        if not wanted:
            return reversed(waiting)
        fewest = min((node for node in wanted if node is not None), key=lambda n: len(n.users))
        alike = set(waiting)
        return sorted((user for user in fewest.users if user in alike), key=self.at)

    def _taken(self) -> set[fx.Node]:
        return {node for olds, news in self.replaced for node in (*olds, *news)}


class _Groups:
    """Groups of nodes before and nodes after that claim each other; what overlaps is one group."""

    def __init__(self) -> None:
        self._of: dict[fx.Node, int] = {}
        self._groups: dict[int, tuple[dict[fx.Node, None], dict[fx.Node, None]]] = {}
        self._count = 0

    def add(self, node: fx.Node, claimed: list[fx.Node]) -> None:
        if not claimed:
            return
        self._count += 1
        olds, news = dict.fromkeys(claimed), {node: None}
        for other in dict.fromkeys(self._of[old] for old in claimed if old in self._of):
            more_olds, more_news = self._groups.pop(other)
            olds, news = {**more_olds, **olds}, {**more_news, **news}
        self._groups[self._count] = olds, news
        self._of.update(dict.fromkeys(olds, self._count))

    def found(self) -> Iterable[tuple[list[fx.Node], list[fx.Node]]]:
        return ((list(olds), list(news)) for olds, news in self._groups.values())


def survivors(journal: Sequence[GraphChange], names: Sequence[str]) -> dict[str, str] | None:
    """Follow nodes through a journal: name before → name after, for those that are still there.

    Returns:
        None when the journal does not tell, since the whole graph was exchanged.
    """
    origin: dict[str, str | None] = {name: name for name in names}
    for change in journal:
        if change.kind == "adopt":
            return None
        if change.kind == "insert":
            origin[change.name] = None
        elif change.kind == "erase":
            origin.pop(change.name, None)
        elif change.kind == "rename":
            found = _RENAMED.fullmatch(change.detail)
            if found is not None and found["old"] in origin:
                origin[found["new"]] = origin.pop(found["old"])
    return {first: now for now, first in origin.items() if first is not None}


def identity(node: fx.Node) -> tuple[str, str]:
    """Return what a node is: its operator, and for what has one its target."""
    target = str(node.target) if node.op in ("get_attr", "placeholder", "call_module") else ""
    return operator_name(node), target


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands in the order of the operator's arguments, as often as they are read."""
    found: list[fx.Node] = []
    map_arg(_arguments(node), lambda n: found.append(n))
    return found


def constants(node: fx.Node) -> str:
    """Write the arguments with a mark in place of each operand."""
    return repr(map_arg(_arguments(node), lambda _: "%"))


def _arguments(node: fx.Node) -> Any:
    """Return the arguments by the names of the schema, so that spellings are the same."""
    call = None if node.op in COMPUTES_NOTHING else resolve(node)
    if call is None or call.operator.overload is None:
        return node.args, node.kwargs
    return dict(call.arguments)
