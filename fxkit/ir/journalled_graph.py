"""What can be taken back: a graph under edit with its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx

from fxkit.ir.journal import Entry, Journal, snapshot
from fxkit.ir.surgery import erase_node, revive_node
from fxkit.ir.verifier import verify


class JournalledGraph:
    """A graph whose changes are written down, each with what takes it back.

    Attributes:
        gm: The module under edit.
        graph: Its graph.
        by: Who makes the changes that come next.
        journal: What was changed so far, each a `Change`, oldest first.
    """

    def __init__(self, gm: fx.GraphModule, by: str = "") -> None:
        self.gm = gm
        self.graph = gm.graph
        self.by = by
        self.journal = Journal()
        self._size = len(gm.graph.nodes)
        self._name_counts = dict(gm.graph._graph_namespace._base_count)

    @property
    def is_modified(self) -> bool:
        """Whether anything was changed."""
        return bool(self.journal.entries)

    def mark(self) -> int:
        """Return the present place in the journal, for `undo`."""
        return len(self.journal)

    def undo(self, to: int = 0) -> None:
        """Take back every change after the place that `mark` returned; all when left out."""
        entries = self.journal.entries
        while len(entries) > to:
            self._take_back(entries.pop())
        if not entries:
            self.graph._graph_namespace._base_count = dict(self._name_counts)

    def check(self) -> None:
        """Check the invariants of what was changed.

        When the graph has another number of nodes than the journal tells, or was swapped for
        another, somebody changed it behind the session's back, and all of it is checked.

        Cost: linear in the changes, or in the graph.

        Raises:
            InvalidGraphError: When an invariant does not hold.
        """
        entries = self.journal.entries
        kinds = Counter(entry[0] for entry in entries)
        expected = self._size + kinds["insert"] - kinds["erase"]
        if expected != len(self.graph.nodes) or kinds["adopt"] or 4 * len(entries) > expected:
            verify(self.gm)
            return
        touched = {entry[1]: None for entry in entries if entry[1] is not None}
        verify(self.gm, only=[node for node in touched if not node._erased])

    def diff(self) -> str:
        """Return the journal as text, one change a line."""
        return "\n".join(str(change) for change in self.journal)

    def _note(self, kind: str, node: fx.Node, undo: Any) -> None:
        """Write a change of a node's operands or target down."""
        self.journal.entries.append((kind, node, node.name, self.by, snapshot(node), undo))

    def _record(self, kind: str, what: fx.Node | str, text: str, undo: Callable[[], None]) -> None:
        """Write any other change down: of a node, or of the attribute of that name."""
        node, name = (None, what) if isinstance(what, str) else (what, what.name)
        self.journal.entries.append((kind, node, name, self.by, text, undo))

    def _take_back(self, entry: Entry) -> None:
        kind, node, _, _, what, undo = entry
        if callable(undo):
            undo()
            return
        assert node is not None
        if kind == "insert":
            self._remove(node)
        elif kind == "erase":
            revive_node(node, undo, what[2], what[3])
        else:
            node._update_args_kwargs(*undo)

    def _remove(self, node: fx.Node) -> None:
        erase_node(node)
        self._forget_name(node)

    def _forget_name(self, node: fx.Node) -> None:
        names = self.graph._graph_namespace
        names._used_names.discard(node.name)
        names._obj_to_name.pop(node, None)

    def _restore_name(self, node: fx.Node, name: str) -> None:
        names = self.graph._graph_namespace
        self._forget_name(node)
        node.name = name
        names._used_names.add(name)
        names._obj_to_name[node] = name
