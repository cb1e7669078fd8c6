"""What can be taken back: a graph under edit with its journal."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import fx

from fxkit.errors import RewriteError
from fxkit.ir.code_tracer import read_by_code
from fxkit.ir.generated_code import try_code
from fxkit.ir.journal import Entry, Journal, snapshot
from fxkit.ir.many_operands import Exchange, settle
from fxkit.ir.open_sessions import check_no_other_session
from fxkit.ir.verifier import verify
from fxkit.torch_adapters.code_on_demand import bring_up_to_date, code_on_demand
from fxkit.torch_adapters.fx_nodes import is_erased, set_arguments
from fxkit.torch_adapters.graph_surgery import (
    erase_node,
    forget_name,
    name_counts,
    restore_name_counts,
    revive_node,
)


class JournalledGraph:
    """A graph whose changes are written down, each with what takes it back.

    Attributes:
        gm: The module under edit.
        by: Who makes the changes that come next.
        originals: Nodes whose source, module and provenance the nodes that come next are given.
        journal: What was changed so far, each a `GraphChange`, oldest first.
        number: Once it is over and has changed something, its place among all sessions; 0 when
            another one has taken its changes over.
        number_before: That of the session which changed the module before it.
    """

    number: int | None = None
    number_before = 0

    def __init__(self, gm: fx.GraphModule, by: str = "") -> None:
        self.gm = gm
        self.by = by
        self.originals: tuple[fx.Node, ...] = ()
        self.journal = Journal()
        self._start = 0
        self._compiled: Entry | None = None
        self._unsettled: set[fx.Node] = set()
        self._size = len(gm.graph.nodes)
        self._name_counts = name_counts(gm.graph)

    @property
    def graph(self) -> fx.Graph:
        """The graph of the module."""
        return self.gm.graph

    @property
    def is_modified(self) -> bool:
        """Whether anything was changed."""
        return bool(self.journal.entries)

    def mark(self) -> int:
        """Return the present place in the journal, for `undo`."""
        return len(self.journal)

    def undo(self, to: int | None = None) -> None:
        """Take back every change after the place that `mark` returned.

        Without a place, all of them; in a block that joined an open session, all of the block's.

        Raises:
            RewriteError: When there is no such place.
        """
        entries = self.journal.entries
        to = self._start if to is None else to
        if not 0 <= to <= len(entries):
            raise RewriteError(
                f"expected a place in a journal of {len(entries)} changes, got {to}",
                hint="give what edit.mark() returned, or nothing to take all back",
            )
        while len(entries) > to:
            self._take_back(entries.pop())
        self.settle()
        if not entries:
            restore_name_counts(self.graph, self._name_counts)

    def settle(self) -> None:
        """Let the nodes with very many operands list them in order. Cost: linear in those.

        While their operands are exchanged one by one, `all_input_nodes` has another order.
        """
        for node in self._unsettled:
            settle(node)
        self._unsettled.clear()

    @contextlib.contextmanager
    def savepoint(self, by: str = "") -> Iterator[None]:
        """Check what the block changes when it ends, or take it back when it raises.

        The code is out of date then, see `outdate`.

        Args:
            by: Who makes the changes of the block; as before when left out.
        """
        outer = self._start, self.by
        start = self._start = self.mark()
        self.by = by or self.by
        try:
            yield
            self.settle()
            if self.mark() > start:
                self.check(start)
                try_code(self.graph, self._touched(start))
            self.outdate()
        except BaseException as error:
            if self._takes_back(error):
                is_changed = self.mark() > start
                self.undo(start)
                self.outdate(always=is_changed)
            raise
        finally:
            self._start, self.by = outer

    def recompile(self) -> None:
        """Bring the module's code up to date with what the session has done so far."""
        self.outdate()
        bring_up_to_date(self.gm)

    def outdate(self, *, always: bool = False) -> None:
        """Let code be generated when it is asked for next, when the graph has changed, or always.

        A module that has a `recompile` or a code generator of its own is recompiled at once.
        """
        if always or self._latest is not self._compiled:
            read_by_code(self.gm)
            if not code_on_demand(self.gm, check_no_other_session):
                self.gm.recompile()
            self._compiled = self._latest

    def take_over(self, inner: JournalledGraph) -> None:
        """Add what another session has changed in the same module, and end with its code."""
        is_compiled = inner._latest is inner._compiled
        was_compiled = self._latest is self._compiled
        self.journal.entries.extend(inner.journal.entries)
        if is_compiled and was_compiled:
            self._compiled = self._latest

    def check(self, since: int = 0) -> None:
        """Check the invariants of what was changed.

        When the graph has another number of nodes than the journal tells, or was swapped for
        another, somebody changed it behind the session's back, and all of it is checked.

        Args:
            since: The place in the journal from which on changes are looked at.

        Cost: linear in the changes, or in the graph.

        Raises:
            InvalidGraphError: When an invariant does not hold.
        """
        entries = self.journal.entries
        kinds = Counter(entry[0] for entry in entries)
        expected = self._size + kinds["insert"] - kinds["erase"]
        recent = entries[since:]
        if expected != len(self.graph.nodes) or kinds["adopt"] or 4 * len(recent) > expected:
            verify(self.gm)
            return
        changed = {entry[2] for entry in recent if entry[0] == "attribute"}
        verify(self.gm, only={**self._touched(since), **dict.fromkeys(self._readers(changed))})

    def _touched(self, since: int) -> dict[fx.Node, None]:
        """Return the nodes of the graph that changes have made or changed."""
        touched = (entry[1] for entry in self.journal.entries[since:])
        return {node: None for node in touched if node is not None and not is_erased(node)}

    def diff(self) -> str:
        """Return the journal as text, one change a line."""
        return "\n".join(str(change) for change in self.journal)

    def _readers(self, names: Collection[str]) -> Iterator[fx.Node]:
        """Yield the nodes that read attributes of the root module, or call what lies in them."""
        for op in ("get_attr", "call_module") if names else ():
            for node in self.graph.find_nodes(op=op):
                if str(node.target).partition(".")[0] in names:
                    yield node

    @property
    def _latest(self) -> Entry | None:
        entries = self.journal.entries
        return entries[-1] if entries else None

    def _takes_back(self, error: BaseException) -> bool:
        """Tell whether a block that ends with this error is to be taken back."""
        return True

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
            if isinstance(undo, Exchange):
                self._unsettled.add(undo.node)
            return
        assert node is not None
        if kind == "insert":
            self._remove(node)
        elif kind == "erase":
            revive_node(node, undo, what[2], what[3])
        else:
            set_arguments(node, *undo)

    def _remove(self, node: fx.Node) -> None:
        erase_node(node)
        forget_name(node)
