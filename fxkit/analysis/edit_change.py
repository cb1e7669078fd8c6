"""What edit sessions did to a graph of a program, to be done to its other graphs too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from fxkit.analysis.editing import edit
from fxkit.errors import RewriteError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.session import EditSession
from fxkit.ir.types import KEY as TYPE_KEY

# What a node is known by in another graph: kind, target, and the place in the program.
_Key = tuple[str, Any, Any, str]


@dataclass(frozen=True, slots=True)
class _NodeState:
    """A node at one moment."""

    node: fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: _Key

    @property
    def operands(self) -> tuple[Any, Any]:
        """All operands."""
        return self.args, dict(self.kwargs)

    def is_same(self, other: _NodeState) -> bool:
        """Tell whether the node is the same at another moment."""
        mine, theirs = (self.op, self.target, self.operands), (other.op, other.target)
        return mine == (*theirs, other.operands)


class EditChange:
    """What edit sessions did to a graph: the graph before and after.

    In another graph of the program a node is known by what it calls, the line and the module that
    it comes from, and its number among those which share these; where there are more or fewer of
    them, the edit can't be made there. A value whose users were all given another one has that for
    all its users there, too.

    Args:
        gm: The graph, as it is before the edit.
    """

    alters_results = True

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self._before = _states(gm)
        self._after: list[_NodeState] | None = None

    def __str__(self) -> str:
        return "an edit of its graph"

    @property
    def is_settled(self) -> bool:
        """Whether sessions that come later are no part of it."""
        return self._after is not None

    def settle(self) -> None:
        """Let what sessions do from now on be no part of it."""
        self._after = self._now()

    def _now(self) -> list[_NodeState]:
        return _states(self.gm) if self._after is None else self._after

    def apply(self, gm: fx.GraphModule, args: tuple[Any, ...] | None) -> None:
        """Do to another graph what was done to the first one.

        Raises:
            RewriteError: When the other graph differs where the first one was edited.
        """
        with edit(gm) as session:
            _Replay(self.gm, self._before, self._now(), session).run()


class _Replay:
    """Makes an edit in another graph."""

    def __init__(
        self,
        first: fx.GraphModule,
        before: list[_NodeState],
        after: list[_NodeState],
        session: EditSession,
    ) -> None:
        self._first = first
        self._session = session
        self._before = {state.node: state for state in before}
        self._after = {state.node: state for state in after}
        self._ours = _by_key(before)
        self._theirs = _by_key(_states(session.gm))
        self._made: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        self._check_order()
        erased = [it for node, it in self._before.items() if node not in self._after]
        for state in erased:
            self._check_same(state)
        replaced = self._replacements()
        self._insert(replaced)
        self._replace(replaced)
        for state in reversed(erased):
            self._session.erase(self._partner(state.node))

    def _check_order(self) -> None:
        left = [node for node in self._before if node in self._after]
        if left != [node for node in self._after if node in self._before]:
            raise _unlike("an edit that moves nodes", self._first.graph.output_node())
        lost = [it.node for it in self._before.values() if it.op == "placeholder"]
        if any(node not in self._after for node in lost):
            raise _unlike("an edit that takes inputs away", lost[0])

    def _check_same(self, state: _NodeState) -> None:
        """Refuse another node in the place of one that the edit has erased."""
        partner = self._partner(state.node)
        if not self._is_same(state.operands, (partner.args, dict(partner.kwargs))):
            raise _unlike("other operands", partner)

    def _insert(self, replaced: dict[fx.Node, fx.Node]) -> None:
        """Insert what the edit has made: before the same node, or before its first user."""
        old = {new: self._partner(node) for node, new in replaced.items()}
        waiting: list[_NodeState] = []
        for node, state in self._after.items():
            if node not in self._before:
                waiting.append(state)
                continue
            users = [user for it in waiting if it.node in old for user in old[it.node].users]
            place = min([self._partner(node), *users]) if waiting else None
            for new in waiting:
                self._insert_one(new, place)
            waiting = []

    def _insert_one(self, state: _NodeState, place: fx.Node | None) -> None:
        if state.op in ("get_attr", "call_module"):
            self._lend(str(state.target))
        args, kwargs = fx.map_arg(state.operands, self._partner)
        session, node = self._session, state.node
        made = session.insert(state.op, state.target, args, kwargs, before=place, name=node.name)
        made.meta.update({k: v for k, v in node.meta.items() if k not in (TYPE_KEY, "val")})
        self._made[node] = made

    def _lend(self, path: str) -> None:
        """Give the other graph's module what a new node reads of the first one's."""
        gm, top = self._session.gm, path.partition(".")[0]
        if not hasattr(gm, top):
            name = self._session.register(top, getattr(self._first, top))
            assert name == top, name
        elif find_attribute(gm, path) is not find_attribute(self._first, path):
            raise _unlike(f"another value in {path}", gm.graph.output_node())

    def _replacements(self) -> dict[fx.Node, fx.Node]:
        """Return the values whose users have all been given one other value, and that one."""
        found: dict[fx.Node, set[Any]] = {}
        for node, was in self._before.items():
            now = self._after.get(node)
            if now is not None:
                _compare(was.operands, now.operands, found)
        single = {old: next(iter(new)) for old, new in found.items() if len(new) == 1}
        return {o: n for o, n in single.items() if isinstance(n, fx.Node) and n is not o}

    def _replace(self, replaced: dict[fx.Node, fx.Node]) -> None:
        """Give users other operands: those of a value that is replaced, and others one by one."""
        session = self._session
        own = set(self._made.values())
        partners = {node: self._partner(node) for node in replaced}
        for old, new in replaced.items():
            session.replace_uses(partners[old], self._partner(new), lambda user: user not in own)
        for node, now in self._after.items():
            was = self._before.get(node)
            if was is None or was.is_same(now):
                continue
            if (was.op, was.target) != (now.op, now.target):
                session.set_target(self._partner(node), now.target, now.op)
            change = partial(self._merged, replaced)
            theirs = self._partner(node)
            args, kwargs = change(was.operands, now.operands, (theirs.args, dict(theirs.kwargs)))
            if (args, kwargs) != (theirs.args, dict(theirs.kwargs)):
                session.set_args(theirs, args, kwargs)

    def _merged(self, replaced: dict[fx.Node, fx.Node], was: Any, now: Any, theirs: Any) -> Any:
        """Return operands of the other graph's node with what the edit has changed in them."""
        if isinstance(was, fx.Node) and replaced.get(was) is now:
            return theirs
        if was is now or (type(was) is type(now) and not _has_parts(was) and was == now):
            return theirs
        if _has_parts(was) and _is_alike(was, now) and _is_alike(was, theirs):
            merged = partial(self._merged, replaced)
            if isinstance(was, Mapping):
                return {key: merged(was[key], now[key], theirs[key]) for key in was}
            parts: tuple[Any, Any, Any] = (was, now, theirs)
            kind: Any = type(theirs)
            return kind(merged(*part) for part in zip(*parts, strict=True))
        if not self._is_same(was, theirs):
            raise _unlike(f"{theirs} where it had {was}", self._session.graph.output_node())
        return fx.map_arg(now, self._partner)

    def _is_same(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, fx.Node):
            return self._partner(ours) is theirs
        if _has_parts(ours):
            if not _is_alike(ours, theirs):
                return False
            keys = ours if isinstance(ours, Mapping) else range(len(ours))
            return all(self._is_same(ours[key], theirs[key]) for key in keys)
        return type(ours) is type(theirs) and (ours == theirs or ours != ours)

    def _partner(self, node: fx.Node) -> fx.Node:
        """Return what stands for a node of the first graph.

        Raises:
            RewriteError: When nothing does.
        """
        if node in self._made:
            return self._made[node]
        key = self._before[node].key
        ours, theirs = self._ours[key], self._theirs.get(key, [])
        if len(ours) != len(theirs):
            count = len(theirs) or "none"
            raise _unlike(f"{count} in the place of {len(ours)}", node)
        return theirs[ours.index(node)]


def _states(gm: fx.GraphModule) -> list[_NodeState]:
    return [
        _NodeState(node, node.op, node.target, node.args, node.kwargs, _key(node))
        for node in gm.graph.nodes
    ]


def _key(node: fx.Node) -> _Key:
    place = node.meta.get("stack_trace"), str(node.meta.get("nn_module_stack"))
    return node.op, node.target, *place


def _by_key(states: list[_NodeState]) -> dict[_Key, list[fx.Node]]:
    found: dict[_Key, list[fx.Node]] = {}
    for state in states:
        found.setdefault(state.key, []).append(state.node)
    return found


def _compare(was: Any, now: Any, found: dict[fx.Node, set[Any]]) -> None:
    """Note what has come into the place of each node among some operands."""
    if isinstance(was, fx.Node):
        found.setdefault(was, set()).add(now if isinstance(now, fx.Node) else None)
    elif _has_parts(was):
        keys: Iterator[Any] = iter(was) if isinstance(was, Mapping) else iter(range(len(was)))
        for key in keys:
            _compare(was[key], now[key] if _is_alike(was, now) else None, found)


def _has_parts(value: Any) -> bool:
    return isinstance(value, (tuple, list, Mapping))


def _is_alike(a: Any, b: Any) -> bool:
    """Tell whether two nested operands have the same parts."""
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        return isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys()
    is_list = isinstance(a, (tuple, list)) and isinstance(b, (tuple, list))
    return is_list and len(a) == len(b)


def _unlike(what: str, node: fx.Node) -> RewriteError:
    return RewriteError(
        f"expected a graph in which the edit of another one can be made again, got {what}",
        node=format_node(node),
        source=format_source(node),
        hint="make the change by fxkit.rewrite or a pass, which look at each graph anew",
    )
