"""Put parts of a graph into submodules, many at once, in time linear in the graph.

`fxkit.analysis.slices.outline` does it for one part, and looks at the whole graph for it. Here the
nodes are brought once into an order in which each part is a run of neighbours.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from fxkit.errors import RewriteError
from fxkit.ir.code_tracer import CodeTracer
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.session import EditSession
from fxkit.ir.types import set_type, type_of

Edges = Mapping[fx.Node, Sequence[fx.Node]]


@dataclass(frozen=True, eq=False)
class GraphPart:
    """Nodes that go into a submodule together.

    Attributes:
        nodes: The nodes, in graph order; reads of parameters are not among them.
        inputs: Nodes outside that they take, in graph order, reads of parameters left out.
        outputs: Those of them that are used outside, in graph order; the last one when none is. So
            a part that takes all that the one before it gives takes it in the order that it comes.
        reads: Reads of parameters and buffers that they take.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]

    @classmethod
    def of(cls, nodes: Iterable[fx.Node]) -> GraphPart:
        """Make a part of nodes that are given in graph order. Cost: linear in their edges."""
        members = dict.fromkeys(nodes)
        taken = sorted({o for n in members for o in n.all_input_nodes if o not in members})
        outputs = tuple(n for n in members if any(user not in members for user in n.users))
        return cls(
            nodes=tuple(members),
            inputs=tuple(n for n in taken if n.op != "get_attr"),
            outputs=outputs or tuple(members)[-1:],
            reads=tuple(n for n in taken if n.op == "get_attr"),
        )

    def module(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return a copy of the nodes as a module that shares its parameters with `gm`.

        It returns one value when one node is used outside, else a tuple of them.
        """
        graph = fx.Graph(tracer_cls=CodeTracer)
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in (*self.reads, *self.nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        results = tuple(copies[node] for node in self.outputs)
        graph.output(results[0] if len(results) == 1 else results)
        return fx.GraphModule(gm, graph)


def outline_parts(
    edit: EditSession,
    parts: Sequence[tuple[GraphPart, nn.Module]],
    effects: Edges,
    name: Callable[[int], str],
) -> list[fx.Node]:
    """Replace each part by one call of its module.

    Args:
        edit: The session.
        parts: Disjoint parts, with the module to call for each; it takes the part's inputs and
            returns its one output, or a tuple of them.
        effects: What `effect_predecessors` returns for the graph.
        name: Name for the submodule of each part, by its index; made unique when taken.

    Returns:
        The calls, in the order of `parts`.

    Raises:
        RewriteError: When a part is not convex: something outside comes after one of its nodes and
            before another.
    """
    if not parts:
        return []
    _bring_together(edit, [part for part, _ in parts], effects)
    caller = _Caller(edit)
    calls = [caller.call(part, module, name(i)) for i, (part, module) in enumerate(parts)]
    for read in {read: None for part, _ in parts for read in part.reads}:
        if not read.users:
            edit.erase(read)
    return calls


class _Caller:
    """Puts calls in the place of parts that are runs of neighbours already."""

    def __init__(self, edit: EditSession) -> None:
        self._edit = edit
        self._now: dict[fx.Node, fx.Node] = {}

    def call(self, part: GraphPart, module: nn.Module, name: str) -> fx.Node:
        """Insert the call behind the part's last node, and erase the part."""
        edit = self._edit
        path = edit.register(name, module)
        place = part.nodes[-1].next
        inputs = tuple(self._now.get(node, node) for node in part.inputs)
        with edit.on_behalf_of(part.nodes, edit.by):
            call = edit.insert("call_module", path, inputs, before=place, name=path)
        types = tuple(type_of(node) for node in part.outputs)
        if None not in types:
            set_type(call, types[0] if len(types) == 1 else types)
        members = set(part.nodes)
        for index, node in enumerate(part.outputs):
            value = call
            if len(part.outputs) > 1:
                with edit.on_behalf_of([node], edit.by):
                    value = edit.call(operator.getitem, call, index, before=place, name=node.name)
            self._now[node] = value
            edit.replace_uses(node, value, where=lambda user: user not in members)
        for node in reversed(part.nodes):
            edit.erase(node)
        return call


def _bring_together(edit: EditSession, parts: Sequence[GraphPart], effects: Edges) -> None:
    """Move nodes until each part is a run of neighbours; move as few as the parts ask for."""
    following = _after_inputs(next(iter(edit.graph.nodes)))
    for node in _new_order(edit.graph, parts, effects):
        if node is following:
            following = _after_inputs(node.next)
        else:
            edit.move(node, before=following)


def _after_inputs(node: fx.Node) -> fx.Node:
    """Return the node, or the first behind it that is no input."""
    while node.op == "placeholder":
        node = node.next
    return node


def _new_order(graph: fx.Graph, parts: Sequence[GraphPart], effects: Edges) -> list[fx.Node]:
    """Return the nodes but for inputs and output, each part in one piece, else as they were."""
    group: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for part in parts:
        group.update(dict.fromkeys(part.nodes, part.nodes))
    last = {part.nodes[-1] for part in parts}
    emitter = _Emitter(group, effects)
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and (node not in group or node in last):
            emitter.emit(node)
    return emitter.order


class _Emitter:
    """Emits nodes after all that they need; a depth-first walk without recursion."""

    def __init__(self, group: dict[fx.Node, tuple[fx.Node, ...]], effects: Edges) -> None:
        self.order: list[fx.Node] = []
        self._group = group
        self._effects = effects
        self._state: dict[fx.Node, str] = {}

    def emit(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            first = self._members(stack[-1])[0]
            state = self._state.get(first)
            if state is None:
                self._state[first] = "open"
                stack.extend(self._needed(self._members(first)))
                continue
            stack.pop()
            if state == "open":
                self._state[first] = "done"
                self.order.extend(self._members(first))

    def _members(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return self._group.get(node, (node,))

    def _needed(self, members: tuple[fx.Node, ...]) -> list[fx.Node]:
        """Return one node of each thing that has to come first."""
        mine = self._group.get(members[0])
        needed: dict[fx.Node, None] = {}
        for member in members:
            for node in (*member.all_input_nodes, *self._effects.get(member, ())):
                if node.op == "placeholder" or self._group.get(node, ()) is mine:
                    continue
                first = self._members(node)[0]
                state = self._state.get(first)
                if state == "open":
                    raise _not_convex(node, member)
                if state is None:
                    needed[first] = None
        return list(reversed(needed))


def _not_convex(node: fx.Node, member: fx.Node) -> RewriteError:
    return RewriteError(
        f"expected parts that can run one after another, got %{member.name} that needs "
        f"%{node.name}, which needs the part of %{member.name}",
        node=format_node(member),
        source=format_source(member),
        hint="take the nodes between into the part, or split it",
    )
