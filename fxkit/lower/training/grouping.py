"""Which nodes of a trained graph come together in a stage: those that reach the same results.

Autograd sees nothing of what lies within one function. So what only some results need stands apart
from what others need: a backward from one of them runs, and visits, what eager would, and a result
that no loss is computed from gets no gradient in place of zeros. Where one result is computed from
another, the graph is cut by that too, for the first reaches what the second does and itself.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxkit.analysis.effects import PURE, AliasSets, effects_of
from fxkit.ir.op import operator_of
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters import pytree
from fxkit.tracing.functional.observation import MODES, is_functional


def groups_of(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the calls of each stage, in the order of the stages.

    A recurrent layer is a group of its own. What takes its results apart stands with it, so that
    stages give tensors, and so do the zeros that it begins with. What sets a mode is in no group,
    except where there is one group only.
    """
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    results = followed_results(graph)
    if len(results) < 2 and not any(map(is_recurrent, calls)):
        return [calls] if calls else []
    grouping = _Grouping(graph, results)
    calls = [node for node in calls if node.target not in MODES]
    for node in calls:
        grouping.place(node)
    for node in reversed(calls):
        grouping.sink(node)
    groups: list[list[fx.Node]] = [[] for _ in grouping.signatures]
    for node in calls:
        groups[grouping.places[node]].append(node)
    return [group for group in groups if group]


def followed_results(graph: fx.Graph) -> list[fx.Node]:
    """Return the results of calls that have a gradient."""
    nodes = graph.output_node().all_input_nodes
    return [node for node in nodes if node.op.startswith("call_") and _is_followed(node)]


def signatures_of(
    graph: fx.Graph, results: list[fx.Node], aliases: AliasSets
) -> dict[fx.Node, int]:
    """Return which results the gradient of each node comes from, as a bit for each of them.

    What is written into memory reaches what reads it afterwards. Another bit stands for what has a
    gradient and has to run, though it reaches no result.
    """
    followed = _followed(graph)
    signatures = dict.fromkeys(graph.nodes, 0)
    read: dict[fx.Node, int] = {}
    for position, node in enumerate(results):
        signatures[node] = read[aliases.root(node)] = 1 << position
    for node in reversed(graph.nodes):
        if not node.op.startswith("call_"):
            continue
        given = effects_of(node).aliases  # which statistics of a norm are not: they aren't followed
        for target in filter(given.__contains__, writes_of(node)):
            signatures[node] |= read.get(aliases.root(target), 0)
        if node not in followed:  # yet, if what autograd follows is written into it
            signatures[node] *= aliases.is_written(node)
        elif not signatures[node] and keeps_order(node, aliases):
            signatures[node] = 1 << len(results)
        for operand in node.all_input_nodes:
            signatures[operand] |= signatures[node]
            root = aliases.root(operand)
            read[root] = read.get(root, 0) | signatures[node]
    return signatures


def _followed(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that give what autograd may follow, or write it."""
    followed: set[fx.Node] = set()
    for node in graph.nodes:
        is_unknown = type_of(node) is None and node.op.startswith("call_")
        if not followed.isdisjoint(node.all_input_nodes) if is_unknown else _is_followed(node):
            followed.add(node)
    return followed


def keeps_order(node: fx.Node, aliases: AliasSets) -> bool:
    """Tell whether a node has an effect, or touches what others write to."""
    if not effects_of(node).is_pure:
        return node.target not in MODES
    return any(map(aliases.is_written, (node, *node.all_input_nodes)))


def writes_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a node writes to."""
    effects = effects_of(node)
    if effects.is_opaque and (node.target in MODES or is_functional(node)):
        return []
    return [it for it in effects.writes if isinstance(it, fx.Node)]


def is_recurrent(node: fx.Node) -> bool:
    """Tell whether a node is a recurrent layer, over all steps of its input."""
    called = operator_of(node)
    return called is not None and called.name in _RECURRENT


_RECURRENT = frozenset({"aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"})


def is_no_tensor(node: fx.Node) -> bool:
    """Tell whether a node is known to give something else than a tensor."""
    known = type_of(node)
    return known is not None and not isinstance(known, TensorType)


# Signatures of groups: of one that nodes of any may join, and of one that none may.
_ANY, _CLOSED = 0, -1


@dataclass
class _Grouping:
    """Places nodes in groups, each of which takes what those before it give.

    Args:
        graph: The graph.
        results: Its results with a gradient.

    Attributes:
        signatures: The results that each group reaches.
        places: Node → the number of its group.
    """

    graph: fx.Graph
    results: list[fx.Node]
    signatures: list[int] = field(default_factory=list)
    places: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._aliases = AliasSets(self.graph)
        self._reached = signatures_of(self.graph, self.results, self._aliases)
        self._lowest: dict[fx.Node, int] = {}
        self._fixed: set[fx.Node] = set()
        self._last_effect = -1

    def place(self, node: fx.Node) -> None:
        """Place a node behind its operands; what reaches no result may wait for its users."""
        if node in self.places or _begins(node):
            return
        operands = [o for o in node.all_input_nodes if o in self._lowest]
        lowest = max((self._lowest[o] for o in operands), default=-1)
        wholes = [o for o in operands if is_no_tensor(o)]
        is_ordered = keeps_order(node, self._aliases)
        if is_ordered:
            lowest = max(lowest, self._last_effect)
        if is_ordered or wholes or is_no_tensor(node):
            self._fixed.add(node)
        if is_recurrent(node):
            self._close(node)
        elif wholes and self.places[wholes[0]] == lowest:
            self._put(node, lowest)
        elif signature := self._reached[node]:
            self._put(node, self._latest(signature, lowest))
        elif node in self._fixed or any(map(is_recurrent, node.users)):
            self._put(node, self._open(lowest))
        else:
            self._lowest[node] = lowest
        if is_ordered:
            self._last_effect = self.places[node]

    def sink(self, node: fx.Node) -> None:
        """Move a node to where it is needed first, if that group reaches the same results.

        It is called for the last node first.
        """
        if node in self._fixed:
            return
        first = min((self.places[user] for user in node.users if user in self.places), default=None)
        if node not in self.places:
            self.places[node] = self._open(self._lowest[node]) if first is None else first
        elif first is not None and self.signatures[first] == self._reached[node]:
            self.places[node] = first

    def _put(self, node: fx.Node, group: int) -> None:
        self.places[node] = self._lowest[node] = group

    def _latest(self, signature: int, lowest: int) -> int:
        for group in range(len(self.signatures) - 1, max(lowest, 0) - 1, -1):
            if self.signatures[group] in (signature, _ANY):
                self.signatures[group] = signature
                return group
        return self._append(signature)

    def _open(self, lowest: int) -> int:
        """Return the first group from a number on that may be joined."""
        for group in range(max(lowest, 0), len(self.signatures)):
            if self.signatures[group] != _CLOSED:
                return group
        return self._append(_ANY)

    def _close(self, node: fx.Node) -> None:
        group = self._append(_CLOSED)
        begin = filter(_begins, dict.fromkeys(node.all_input_nodes))
        for member in (*begin, node, *filter(_takes_apart, node.users)):
            self._put(member, group)
            self._fixed.add(member)

    def _append(self, signature: int) -> int:
        self.signatures.append(signature)
        return len(self.signatures) - 1


def _is_followed(node: fx.Node) -> bool:
    """Tell whether a node gives what autograd may follow."""
    known: Any = type_of(node)
    if known is None:
        return True
    return any(isinstance(it, TensorType) and it.requires_grad for it in pytree.tree_leaves(known))


def _begins(node: fx.Node) -> bool:
    """Tell whether a node makes, of nothing, what only one recurrent layer takes."""
    is_made = node.op.startswith("call_") and not node.all_input_nodes
    return (
        is_made
        and [is_recurrent(user) for user in node.users] == [True]
        and effects_of(node) == PURE
    )


def _takes_apart(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    whole = node.args[0]
    return isinstance(whole, fx.Node) and is_recurrent(whole)
