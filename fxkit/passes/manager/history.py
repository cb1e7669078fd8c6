"""What the graph was after each pass and each rewrite, kept as what changed.

The graph as it was at the beginning is noted once, one tuple a node; after that, only the nodes
that the journal names. A snapshot becomes a module when somebody looks at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.printer import format_graph
from fxkit.passes.manager.tracking import TrackedSession
from fxkit.torch_adapters.fx_graphs import codegen_of
from fxkit.torch_adapters.fx_nodes import args_of, is_erased, kwargs_of, rename_node

# What a node is: op, target, args, kwargs, name, meta, and the node that follows it.
_State = tuple[str, Any, Any, Any, str, dict[str, Any], fx.Node]


@dataclass(frozen=True)
class _Delta:
    """States of the nodes that changed; None for one that went. Whole after an adoption."""

    states: Mapping[fx.Node, _State | None]
    is_whole: bool
    upto: int


class TimelineRecorder:
    """Notes what a session changes; see `Timeline`."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.session: TrackedSession | None = None
        self._deltas: list[_Delta] = []
        self._boundaries: list[int] = []
        self._ends: list[tuple[str, int, int]] = [("", 1, 0)]

    def begin(self) -> None:
        """Note the whole graph as it is before the first pass. Cost: linear in the nodes."""
        self._deltas = [_Delta({node: _state(node) for node in self.gm.graph.nodes}, True, 0)]

    def boundary(self) -> None:
        """Note the graph as it is before the next rewrite."""
        assert self.session is not None
        self._capture()
        del self._boundaries[len(self.session.rewrites) :]
        self._boundaries.append(len(self._deltas))

    def end(self, name: str) -> None:
        """Note the graph as it is after a pass."""
        assert self.session is not None
        self._capture()
        self._ends.append((name, len(self._deltas), len(self.session.rewrites)))

    def stray(self) -> fx.Node | None:
        """Return a node that was changed, added or taken away behind the session's back, or None.

        Cost: linear in the nodes.
        """
        assert self.session is not None
        expected: dict[fx.Node, _State | None] = {}
        for delta in self._deltas:
            if delta.is_whole:
                expected.clear()
            expected.update(delta.states)
        for node in self.session.graph.nodes:
            state = expected.pop(node, None)
            if state is None or not _is_as_noted(node, state):
                return node
        return next((node for node, state in expected.items() if state is not None), None)

    def timeline(self) -> Timeline:
        """Return what was noted."""
        boundaries = self._boundaries[: self._ends[-1][2]]
        return Timeline(self.gm, tuple(self._deltas), tuple(boundaries), tuple(self._ends))

    def _capture(self) -> None:
        assert self.session is not None
        entries = self.session.journal.entries
        while self._deltas[-1].upto > len(entries):
            self._deltas.pop()
        since = self._deltas[-1].upto
        if since == len(entries):
            return
        changed = entries[since:]
        if any(entry[0] == "adopt" for entry in changed):
            states = {node: _state(node) for node in self.session.graph.nodes}
            self._deltas.append(_Delta(states, True, len(entries)))
            return
        nodes = dict.fromkeys(entry[1] for entry in changed if entry[1] is not None)
        now: dict[fx.Node, _State | None] = {n: None if is_erased(n) else _state(n) for n in nodes}
        self._deltas.append(_Delta(now, False, len(entries)))


@dataclass(frozen=True)
class GraphSnapshot:
    """The graph as it was at one moment of a run.

    Attributes:
        after: The pass that had just run, or was running; "" at the beginning.
        rewrites: How many rewrites had been made.
    """

    after: str
    rewrites: int
    _gm: fx.GraphModule
    _deltas: tuple[_Delta, ...]

    @property
    def graph_module(self) -> fx.GraphModule:
        """The module as it was then: a new graph, with the parameters that the module has now."""
        return _rebuild(self._gm, self._deltas)

    def __str__(self) -> str:
        return format_graph(self.graph_module)


class Timeline(Sequence[GraphSnapshot]):
    """What the graph was before the first pass, and after each.

    `timeline[0]` is the graph as it was given, `timeline[i]` that after the i-th record of the
    run; `timeline.after_rewrites(k)` that after the first k rewrites of the run. A look at one
    costs time linear in the graph and in all that had been changed until then.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        deltas: tuple[_Delta, ...],
        boundaries: tuple[int, ...],
        ends: tuple[tuple[str, int, int], ...],
    ) -> None:
        self._gm = gm
        self._deltas = deltas
        self._boundaries = boundaries
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> GraphSnapshot: ...

    @overload
    def __getitem__(self, index: slice) -> list[GraphSnapshot]: ...

    def __getitem__(self, index: int | slice) -> GraphSnapshot | list[GraphSnapshot]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        name, end, rewrites = self._ends[index]
        return GraphSnapshot(name, rewrites, self._gm, self._deltas[:end])

    @property
    def rewrites(self) -> int:
        """How many rewrites the run made."""
        return self._ends[-1][2]

    def after_rewrites(self, count: int) -> GraphSnapshot:
        """Return the graph as it was after the first rewrites of the run.

        Args:
            count: How many, from 0 to `rewrites`.

        Raises:
            IndexError: When there were fewer.
        """
        if not 0 <= count <= self.rewrites:
            raise IndexError(f"expected at most {self.rewrites} rewrites, got {count}")
        if count == 0:
            return self[0]
        name, end, _ = next(e for e in self._ends if e[2] >= count)
        if count < len(self._boundaries):
            end = min(end, self._boundaries[count])
        return GraphSnapshot(name, count, self._gm, self._deltas[:end])


def _is_as_noted(node: fx.Node, state: _State) -> bool:
    op, target, args, kwargs = state[:4]
    return (
        node.op == op
        and node.target is target
        and (args_of(node) is args or args_of(node) == args)
        and (kwargs_of(node) is kwargs or kwargs_of(node) == kwargs)
    )


def _state(node: fx.Node) -> _State:
    return (
        node.op,
        node.target,
        args_of(node),
        kwargs_of(node),
        node.name,
        dict(node.meta),
        node.next,
    )


def _rebuild(gm: fx.GraphModule, deltas: Iterable[_Delta]) -> fx.GraphModule:
    """Make a module of the graph that the deltas lead to."""
    order = _Order()
    for delta in deltas:
        order.apply(delta)
    graph = fx.Graph()
    graph.set_codegen(codegen_of(gm.graph))
    made: dict[fx.Node, fx.Node] = {}
    for node, (op, target, args, kwargs, name, meta, _) in order:
        new = graph.create_node(
            op, target, map_arg(args, made.__getitem__), map_arg(kwargs, made.__getitem__), name
        )
        if new.name != name:
            rename_node(new, name)
        new.meta = dict(meta)
        made[node] = new
    return fx.GraphModule(gm, graph, type(gm).__name__)


class _Order:
    """Nodes in a linked list beside the real one."""

    def __init__(self) -> None:
        self._states: dict[fx.Node, _State] = {}
        self._next: dict[fx.Node | None, fx.Node | None] = {None: None}
        self._previous: dict[fx.Node | None, fx.Node | None] = {None: None}

    def __iter__(self) -> Iterator[tuple[fx.Node, _State]]:
        node = self._next[None]
        while node is not None:
            yield node, self._states[node]
            node = self._next[node]

    def apply(self, delta: _Delta) -> None:
        """Bring the list up to date. Cost: linear in the delta."""
        if delta.is_whole:
            self.__init__()
        for node in delta.states:
            if node in self._next:
                self._unlink(node)
        waiting = {node: state for node, state in delta.states.items() if state is not None}
        self._states.update(waiting)
        for node in delta.states:
            chain: list[fx.Node] = []
            while node in waiting:
                chain.append(node)
                node = waiting.pop(node)[-1]
            for link in reversed(chain):
                self._link(link, self._states[link][-1])

    def _unlink(self, node: fx.Node) -> None:
        before, after = self._previous.pop(node), self._next.pop(node)
        self._next[before], self._previous[after] = after, before

    def _link(self, node: fx.Node, following: fx.Node) -> None:
        after = None if following.op == "root" else following
        before = self._previous[after]
        self._next[before] = self._previous[after] = node
        self._previous[node], self._next[node] = before, after
