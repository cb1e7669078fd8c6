"""Join the graphs of two runs that part at a branch into one graph with a `cond` node.

Up to the branch the two are the same. From their end backwards they may be the same again; what is
in between are the two sides, which become submodules of one `cond` node.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxkit.analysis.effects import AliasSets, effects_of
from fxkit.ir.code_tracer import CodeTracer
from fxkit.ir.types import KEY, TensorType, type_of
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.recorder.control_sides import cond
from fxkit.tracing.values.refusals import Refusal


@dataclass(slots=True)
class Run:
    """The graph of one run.

    Attributes:
        module: The graph.
        checks: The nodes that guard which way each branch went, in order.
        outcomes: Which way that was.
    """

    module: fx.GraphModule
    checks: list[fx.Node]
    outcomes: tuple[bool, ...]


def join(ours: Run, theirs: Run, index: int) -> None:
    """Put a `cond` node in the place of a branch.

    Args:
        ours: The run to be changed. Its branches behind this one have been dealt with.
        theirs: A run that went the other way at this branch.
        index: Which branch it is.

    Raises:
        Refusal: When the two can't be joined.
    """
    _Joining(ours, theirs, index).join()


Key = tuple[str, Any]


class _Joining:
    """Joins two graphs.

    Nodes that both have, and attributes of the modules, are named by keys that are the same for
    both: by the node of ours, and by the attribute's value.
    """

    def __init__(self, ours: Run, theirs: Run, index: int) -> None:
        self._ours, self._index = ours, index
        self._modules = (ours.module, theirs.module)
        checks = (ours.checks[index], theirs.checks[index])
        before, behind = zip(*map(_split, checks), strict=True)
        self._keys: dict[fx.Node, Key] = {}
        self._pair_prefix(*before)
        self._before = before[0]
        self._rest: tuple[list[fx.Node], list[fx.Node]] = tuple(  # type: ignore[assignment]
            [node for node in nodes if node.op != "get_attr"] for nodes in behind
        )
        for module, nodes in zip(self._modules, behind, strict=True):
            for node in nodes:
                if node.op == "get_attr":
                    self._keys[node] = ("attribute", _identity(_attribute(module, node)))
        self._values: dict[Key, Any] = {}
        self._graph = fx.Graph(tracer_cls=CodeTracer)
        self._env: dict[Key, fx.Node] = {}

    def _pair_prefix(self, ours: list[fx.Node], theirs: list[fx.Node]) -> None:
        if len(ours) != len(theirs):
            raise Refusal("the program goes another way before the branch")
        for left, right in zip(ours, theirs, strict=True):
            is_same = left.op == right.op
            if left.op == "get_attr":
                key = ("attribute", _identity(_attribute(self._modules[0], left)))
                is_same = is_same and key[1] == _identity(_attribute(self._modules[1], right))
            else:
                key = ("node", left)
                is_same = is_same and left.target == right.target and self._fit(left, right)
                is_same = is_same and self._same_operands(left, right)
            if not is_same:
                raise Refusal("the program goes another way before the branch")
            self._keys[left] = self._keys[right] = key

    def _same_operands(self, left: fx.Node, right: fx.Node) -> bool:
        pairs = zip(_operands(left), _operands(right), strict=True)
        return all(self._keys.get(a) == self._keys.get(b) is not None for a, b in pairs)

    # What both have again at their end -----------------------------------------------------------

    def _tail(self) -> int:
        """Return how many nodes, from the end backwards, are the same in both."""
        left, right = self._rest
        count = 0
        for a, b in zip(reversed(left), reversed(right), strict=False):
            if a.op != b.op or (a.op != "output" and a.target != b.target) or not self._fit(a, b):
                break
            count += 1
        while count:
            partners = dict(zip(left[-count:], right[-count:], strict=True))
            known = set(partners.values())
            bad = [a for a, b in partners.items() if not self._agree(a, b, partners, known)]
            if not bad:
                return count
            count = len(left) - 1 - left.index(bad[-1])
        raise Refusal("its sides give different things")

    def _fit(self, left: fx.Node, right: fx.Node) -> bool:
        """Tell whether two nodes are the same but for what they are given."""
        if left.target is g.check_value:  # their third argument is the name of a node
            return left.args[1::2] == right.args[1::2]
        same_type = left.op == "output" or type_of(left) == type_of(right)
        return same_type and _is_alike((left.args, left.kwargs), (right.args, right.kwargs))

    def _agree(
        self,
        left: fx.Node,
        right: fx.Node,
        partners: dict[fx.Node, fx.Node],
        known: set[fx.Node],
    ) -> bool:
        for a, b in zip(_operands(left), _operands(right), strict=True):
            if a in partners or b in known:
                if partners.get(a) is not b:
                    return False
            elif not self._same_value(a, b) and not _is_one_type(a, b):
                return False
        return True

    def _same_value(self, left: fx.Node, right: fx.Node) -> bool:
        key = self._keys.get(left)
        return key is not None and key == self._keys.get(right)

    # The joined graph -----------------------------------------------------------------------------

    def join(self) -> None:
        """Build the graph, and put it in the place of ours."""
        count = self._tail()
        left, right = (nodes[: len(nodes) - count] for nodes in self._rest)
        tails = [nodes[len(nodes) - count :] for nodes in self._rest]
        for module, side in zip(self._modules, (left, right), strict=True):
            _check_pure(module.graph, side)
        inside, joined = set(tails[0]), []
        for a, b in zip(*tails, strict=True):
            for x, y in zip(_operands(a), _operands(b), strict=True):
                if x not in inside and not self._same_value(x, y) and (x, y) not in joined:
                    joined.append((x, y))
        copies = self._copy_prefix()
        results = self._branch(left, right, joined)
        env: dict[fx.Node, fx.Node] = {}

        def given(x: fx.Node, y: fx.Node) -> fx.Node:
            if x in inside:
                return env[x]
            return self._main(x) if self._same_value(x, y) else results[joined.index((x, y))]

        for a, b in zip(*tails, strict=True):
            # Two operands may be one node in ours, and two in theirs.
            operands = iter([given(*it) for it in zip(_operands(a), _operands(b), strict=True)])
            env[a] = self._graph.node_copy(a, lambda _, operands=operands: next(operands))
        self._ours.module = fx.GraphModule(self._root(), self._graph)
        self._ours.checks = [copies[check] for check in self._ours.checks[: self._index]]

    def _copy_prefix(self) -> dict[fx.Node, fx.Node]:
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._before:
            copies[node] = self._graph.node_copy(node, copies.__getitem__)
            self._env[self._keys[node]] = copies[node]
            if node.op == "get_attr":
                self._values[self._keys[node]] = _attribute(self._modules[0], node)
        return copies

    def _main(self, node: fx.Node) -> fx.Node:
        """Return the node of the joined graph for one that both have, or for an attribute."""
        key = self._keys[node]
        if key not in self._env:
            self._values[key] = self._value_of(node)
            self._env[key] = copy = self._graph.get_attr(self._name(str(node.target)))
            copy.meta.update(node.meta)
        return self._env[key]

    def _name(self, wanted: str) -> str:
        taken = {str(node.target) for node in self._graph.nodes if node.op == "get_attr"}
        names = (f"{wanted}_{number}" if number else wanted for number in range(len(taken) + 1))
        return next(name for name in names if name not in taken)

    def _branch(
        self,
        left: list[fx.Node],
        right: list[fx.Node],
        joined: Sequence[tuple[fx.Node, fx.Node]],
    ) -> list[fx.Node]:
        """Append the `cond` node, and return the nodes of its results."""
        if not joined and not any(node.target in (g.check_value, cond) for node in left + right):
            return []
        sides = ((left, [x for x, _ in joined]), (right, [y for _, y in joined]))
        operands = self._operands_of(sides)
        check = self._ours.checks[self._index]
        test = check.args[0]
        assert isinstance(test, fx.Node) and isinstance(test.args[0], fx.Node)
        modules = [
            _side(module, nodes, values, operands, self._keys)
            for module, (nodes, values) in zip(self._modules, sides, strict=True)
        ]
        if not self._ours.outcomes[self._index]:
            modules.reverse()
        names = ("if_true", "if_false")
        attributes = [self._add_module(*it) for it in zip(names, modules, strict=True)]
        given = tuple([self._main(node) for node in operands.values()])
        node = self._graph.call_function(cond, (self._main(test.args[0]), *attributes, given))
        node.meta |= _place_of(test)
        node.meta[KEY] = tuple([type_of(x) for x, _ in joined])
        return [self._take(node, index, x) for index, (x, _) in enumerate(joined)]

    def _operands_of(
        self, sides: Iterable[tuple[list[fx.Node], list[fx.Node]]]
    ) -> dict[Key, fx.Node]:
        """Return what the sides are given, by key."""
        found: dict[Key, fx.Node] = {}
        for nodes, values in sides:
            inside = set(nodes)
            for node in [*(it for each in nodes for it in _operands(each)), *values]:
                if node not in inside and not isinstance(self._value_of(node), fx.GraphModule):
                    found.setdefault(self._keys[node], node)
        return found

    def _value_of(self, node: fx.Node) -> Any:
        if node.op != "get_attr":
            return None
        owner = self._modules[0] if node.graph is self._modules[0].graph else self._modules[1]
        return _attribute(owner, node)

    def _add_module(self, name: str, module: fx.GraphModule) -> fx.Node:
        key = ("attribute", id(module))
        self._values[key] = module
        self._env[key] = node = self._graph.get_attr(self._name(name))
        return node

    def _take(self, source: fx.Node, index: int, like: fx.Node) -> fx.Node:
        node = self._graph.call_function(operator.getitem, (source, index))
        node.meta |= {**like.meta, **_place_of(source)}  # whichever way has run
        return node

    def _root(self) -> dict[str, Any]:
        return {str(self._env[key].target): value for key, value in self._values.items()}


def _place_of(node: fx.Node) -> dict[str, Any]:
    """Return what a node's metadata say of where it ran."""
    names = ("stack_trace", "nn_module_stack")
    return {name: node.meta[name] for name in names if name in node.meta}


def _split(check: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what is before a branch, without the look at its tensor, and what is behind it."""
    nodes = list(check.graph.nodes)
    index = nodes.index(check)
    test = check.args[0]
    return [node for node in nodes[:index] if node is not test], nodes[index + 1 :]


def _attribute(module: fx.GraphModule, node: fx.Node, **default: Any) -> Any:
    value: Any = module
    for step in str(node.target).split("."):
        value = getattr(value, step, *default.values())
    return value


def _identity(value: Any) -> Any:
    """Return what names an attribute: graphs that compute the same are one."""
    if not isinstance(value, fx.GraphModule):
        return id(value)
    numbers = {node: index for index, node in enumerate(value.graph.nodes)}

    def line(node: fx.Node) -> Any:
        if node.op == "placeholder":
            return node.op
        if node.op == "get_attr":
            return _identity(_attribute(value, node))
        arguments = (node.args, node.kwargs)
        if node.target is g.check_value:
            arguments = (node.args[:2], node.args[3])
        named = fx.map_arg(arguments, lambda it: _Number(numbers[it]))
        return node.op, str(node.target), repr(named)

    return tuple([line(node) for node in value.graph.nodes])


class _Number(str):
    """Stands for a node in a text."""

    def __new__(cls, number: int) -> _Number:
        return super().__new__(cls, f"%{number}")

    __slots__ = ()


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a node in order, one that is given twice twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda it: found.append(it) or it)
    return found


def _is_alike(left: Any, right: Any) -> bool:
    """Tell whether two nested arguments are the same but for the nodes among them."""
    if isinstance(left, fx.Node) or isinstance(right, fx.Node):
        return isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(_is_alike, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(map(_is_alike, left.values(), right.values()))
    if isinstance(left, slice) and isinstance(right, slice):
        parts = ((it.start, it.stop, it.step) for it in (left, right))
        return _is_alike(*parts)
    return g.is_same(left, right)


def _is_one_type(left: fx.Node, right: fx.Node) -> bool:
    kind = type_of(left)
    return isinstance(kind, TensorType) and kind == type_of(right)


def _check_pure(graph: fx.Graph, side: list[fx.Node]) -> None:
    """Raise where a side does more than to compute; what it makes itself it may write to."""
    inside, aliases = set(side), None
    for node in side:
        if node.op == "call_function" and node.target is cond:
            continue
        effects = effects_of(node)
        if effects.is_random or effects.is_opaque or effects.is_global:
            raise Refusal(f"a side of it {effects.describe()}")
        if not effects.writes:
            continue
        aliases = aliases or AliasSets(graph)
        shared = {aliases.root(other) for other in graph.nodes if other not in inside}
        if any(not isinstance(it, fx.Node) or aliases.root(it) in shared for it in effects.writes):
            raise Refusal("a side of it writes to a tensor that is older")


def _side(
    module: fx.GraphModule,
    nodes: list[fx.Node],
    values: list[fx.Node],
    operands: dict[Key, fx.Node],
    keys: dict[fx.Node, Key],
) -> fx.GraphModule:
    """Return the graph of one side."""
    graph, root = fx.Graph(tracer_cls=CodeTracer), {}
    env: dict[Any, fx.Node] = {}
    for key, node in operands.items():
        env[key] = graph.placeholder(node.name)
        if KEY in node.meta:
            env[key].meta[KEY] = node.meta[KEY]

    def given(node: fx.Node) -> fx.Node:
        found = env.get(node) or env.get(keys.get(node))
        if found is None:
            root[str(node.target)] = _attribute(module, node)
            found = env[node] = graph.get_attr(str(node.target))
        return found

    for node in nodes:
        env[node] = graph.node_copy(node, given)
    graph.output(tuple([given(value) for value in values]))
    return fx.GraphModule(root, graph)
