"""Read-only objects over a graph: ask, follow, find.

    g = fxkit.graph(gm)
    g.find(F.relu, module="encoder.*")
    g["linear_3"].users
    g["x"].paths_to(g["y"])
    g.dominators()

They are views of the very nodes of `gm.graph`; nothing is copied, nothing can be changed through
them. A graph that was changed since is noticed, and `fxkit.graph(gm)` builds the objects anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis import graph_paths, slices
from fxkit.analysis.dependencies import ancestors, descendants
from fxkit.analysis.effects import Effects, effects_of
from fxkit.analysis.moves import Moves, Verdict
from fxkit.analysis.node_query import NodeQuery
from fxkit.analysis.operator_names import check_known, shown_operator
from fxkit.errors import FxkitError, InvalidGraphError
from fxkit.ir import provenance
from fxkit.ir.graph_arguments import graph_module_of
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_graph, format_node
from fxkit.ir.program_changes import GraphProgram
from fxkit.ir.types import TensorType, type_of

_CACHE = "_fxkit_objects"


class GraphNode:
    """A read-only view of one node; equal to that node.

    Attributes:
        fx_node: The node of torch.fx behind it.
    """

    __slots__ = ("_graph", "fx_node")

    def __init__(self, graph: Graph, fx_node: fx.Node) -> None:
        self._graph = graph
        self.fx_node = fx_node

    def __repr__(self) -> str:
        return format_node(self.fx_node)

    def __eq__(self, other: object) -> bool:
        return self.fx_node is (other.fx_node if isinstance(other, GraphNode) else other)

    def __hash__(self) -> int:
        return hash(self.fx_node)

    @property
    def name(self) -> str:
        """Unique name in the graph."""
        return self.fx_node.name

    @property
    def operator(self) -> str:
        """Name of the operator's identity; the node's kind for inputs, attributes, the output."""
        return shown_operator(self.fx_node)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments by the schema's names, defaults filled in; nodes are views too."""
        call = resolve(self.fx_node)
        if call is None:
            return {}
        return {key: self._graph._wrap(value) for key, value in call.arguments.items()}

    @property
    def op(self) -> str:
        """Kind of the node, as torch.fx has it; `operator` is what it computes."""
        return self.fx_node.op

    @property
    def target(self) -> Any:
        """What it calls or reads, as torch.fx has it."""
        return self.fx_node.target

    @property
    def args(self) -> tuple[Any, ...]:
        """Operands by position as they are written; nodes are views. See `arguments`."""
        return self._graph._wrap(self.fx_node.args)

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Operands by name as they are written; nodes are views."""
        return MappingProxyType(dict(self._graph._wrap(self.fx_node.kwargs)))

    @property
    def meta(self) -> Mapping[Any, Any]:
        """What is noted on the node; write to `fx_node.meta`."""
        return MappingProxyType(self.fx_node.meta)

    @property
    def type(self) -> Any:
        """What is known of the value: a `TensorType`, several nested, a Python value, or None."""
        return type_of(self.fx_node)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the tensor, or None when it is not known or no tensor."""
        return self.type.shape if isinstance(self.type, TensorType) else None

    @property
    def dtype(self) -> torch.dtype | None:
        """Element type of the tensor, or None when it is not known or no tensor."""
        return self.type.dtype if isinstance(self.type, TensorType) else None

    @property
    def producers(self) -> list[GraphNode]:
        """The nodes whose values it takes, each once, in the order of its arguments."""
        return [self._graph._view(n) for n in self.fx_node.all_input_nodes]

    @property
    def users(self) -> list[GraphNode]:
        """The nodes that take its value."""
        return [self._graph._view(n) for n in self.fx_node.users]

    @property
    def ancestors(self) -> list[GraphNode]:
        """All nodes it is computed from, in graph order. Cost: linear in the graph."""
        return self._graph._in_order(ancestors([self.fx_node]))

    @property
    def descendants(self) -> list[GraphNode]:
        """All nodes computed from it, in graph order. Cost: linear in the graph."""
        return self._graph._in_order(descendants([self.fx_node]))

    @property
    def effects(self) -> Effects:
        """What it does besides computing its value."""
        return effects_of(self.fx_node)

    @property
    def source(self) -> provenance.Source | None:
        """The user's line that made it."""
        return provenance.source_of(self.fx_node)

    @property
    def module_path(self) -> str:
        """Qualified name of the module it ran in."""
        return provenance.module_path(self.fx_node)

    def between(self, other: GraphNode | fx.Node | str) -> list[GraphNode]:
        """Return the nodes on any path from this one to `other`, without the two themselves."""
        return self._graph.between(self, other)


Given = GraphNode | fx.Node | str


class Graph:
    """Read-only objects over the nodes of a graph; get one from `fxkit.graph`.

    Where a method takes one of them, its `torch.fx.Node` or its name will do.

    Args:
        gm: The module whose graph it is. Cost: linear in the nodes.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.graph_module = gm
        self._views = {node: GraphNode(self, node) for node in gm.graph.nodes}
        self._by_name = {node.name: view for node, view in self._views.items()}
        self._position = {node: index for index, node in enumerate(self._views)}
        self._seen = [(n, n.args, n.kwargs, n.target, n.name) for n in self._views]

    def __iter__(self) -> Iterator[GraphNode]:
        return iter(self._views.values())

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str | fx.Node) -> GraphNode:
        if isinstance(name, fx.Node):
            return self._view(name)
        if not isinstance(name, str):
            raise FxkitError(
                f"expected the name of a node, got {name!r:.60}",
                hint="write g['relu']; list(g) has the nodes in order",
            )
        view = self._by_name.get(name)
        if view is None:
            raise FxkitError(
                f"expected the name of a node, got {name!r}", hint=self._similar(str(name))
            )
        return view

    def __repr__(self) -> str:
        return format_graph(self.graph_module)

    @property
    def inputs(self) -> list[GraphNode]:
        """The placeholders, in order."""
        return [view for view in self if view.fx_node.op == "placeholder"]

    @property
    def outputs(self) -> list[GraphNode]:
        """The nodes that the graph returns, in order."""
        return next(view for view in reversed(list(self)) if view.fx_node.op == "output").producers

    def find(
        self,
        operator: Any = None,
        *,
        module: str | None = None,
        source: str | None = None,
        dtype: torch.dtype | None = None,
        shape: tuple[int | None, ...] | None = None,
        where: Callable[[GraphNode], bool] | None = None,
    ) -> list[GraphNode]:
        """Return the nodes that fit everything that is given, in graph order.

        Args:
            operator: An operator in any spelling: `F.relu`, `torch.relu`, `nn.ReLU`,
                `aten.relu.default`, `"aten.relu"`; or another callable. The class of a layer that
                may write in place stands for both forms.
            module: Glob over the path of the module a node ran in, such as `"encoder.*.mlp"`.
            source: `"model.py"` or `"model.py:41"`.
            dtype: Element type.
            shape: Sizes; None fits any size.
            where: A predicate of your own.

        Raises:
            FxkitError: When the operator can't be one, is a name that no operator has, or the dtype
                is none.

        Cost: linear in the nodes.
        """
        wanted = NodeQuery(operator, module, source, dtype, shape)
        if wanted.operators:
            check_known(wanted.operators[0], {view.operator for view in self})
        found = (view for view in self if wanted.fits(view.fx_node))
        return [view for view in found if where is None or where(view)]

    def between(self, first: Given, last: Given) -> list[GraphNode]:
        """Return the nodes on any path from one node to another, without the two themselves.

        Cost: linear in the graph.
        """
        inside = descendants([self._node(first)]) & ancestors([self._node(last)])
        return self._in_order(inside)

    def is_convex(self, nodes: Iterable[Given]) -> bool:
        """Tell whether no path leaves the given nodes and enters them again.

        Cost: linear in the graph.
        """
        return graph_paths.is_convex(map(self._node, nodes))

    def paths(self, first: Given, last: Given, limit: int = 100) -> list[list[GraphNode]]:
        """Return the paths from one node to another, ends included, at most `limit` of them.

        Cost: linear in the graph, and in the lengths of the paths returned.
        """
        found = graph_paths.paths(self._node(first), self._node(last), limit)
        return [[self._view(node) for node in path] for path in found]

    def cut(self, sources: Iterable[Given], targets: Iterable[Given]) -> list[GraphNode]:
        """Return a smallest set of nodes that every path from `sources` to `targets` goes through.

        Raises:
            FxkitError: When there are no sources or no targets.

        Cost: a maximum flow (networkx), in practice near linear times the size of the cut.
        """
        starts, ends = [*map(self._node, sources)], [*map(self._node, targets)]
        return self._in_order(graph_paths.smallest_cut(self.graph_module.graph, starts, ends))

    def distance(self, first: Given, last: Given) -> int | None:
        """Return the edges on the shortest path between two nodes, or None where there is none.

        Cost: linear in the graph.
        """
        return graph_paths.distance(self._node(first), self._node(last))

    def boundary(self, nodes: Iterable[Given]) -> tuple[list[GraphNode], list[GraphNode]]:
        """Return what a set of nodes takes from outside, and what of it is used outside."""
        part = slices.boundary(map(self._node, nodes))
        return self._in_order(part.inputs), self._in_order(part.outputs)

    def extract(self, nodes: Iterable[Given]) -> fx.GraphModule:
        """Return a new module that computes a set of nodes; see `fxkit.analysis.slices.extract`."""
        return slices.extract(self.graph_module, list(map(self._node, nodes)))

    def dominators(self) -> dict[GraphNode, GraphNode]:
        """Return each node's immediate dominator: the nearest node on every path from the inputs.

        A node that several inputs lead to independently has none, and is left out. Cost: nearly
        linear (networkx).
        """
        return self._dominators(reverse=False)

    def post_dominators(self) -> dict[GraphNode, GraphNode]:
        """Return each node's immediate post-dominator: the nearest on every path to the output."""
        return self._dominators(reverse=True)

    def effects(self) -> dict[GraphNode, Effects]:
        """Return the nodes that do more than compute their value, with what they do."""
        return {view: view.effects for view in self if not view.effects.is_pure}

    def may_move(self, node: Given, *, before: Given) -> Verdict:
        """Tell whether a node may go right before another one; a no has a `.reason`.

        Cost: linear in the graph the first time, then in the nodes between the two.
        """
        return self._moves.may_move(self._node(node), before=self._node(before))

    def may_merge(self, first: Given, second: Given) -> Verdict:
        """Tell whether one of two nodes may stand for both; a no has a `.reason`."""
        return self._moves.may_merge(self._node(first), self._node(second))

    def is_dead_after(self, value: Given, node: Given) -> Verdict:
        """Tell whether nobody, the caller included, reads a value's memory once a node has run."""
        return self._moves.is_dead_after(self._node(value), self._node(node))

    @functools.cached_property
    def _moves(self) -> Moves:
        return Moves(self.graph_module.graph)

    def to_networkx(self) -> Any:
        """Return a `networkx.DiGraph` whose nodes are names, with `operator` and `type` on each."""
        return graph_paths.as_networkx(self.graph_module.graph)

    def is_current(self) -> bool:
        """Tell whether the graph is still as it was when these objects were made.

        Cost: linear in the nodes, about 0.1 µs each.
        """
        nodes = self.graph_module.graph.nodes
        return len(nodes) == len(self._seen) and all(
            node is seen[0]
            and node.args is seen[1]
            and node.kwargs is seen[2]
            and node.target is seen[3]
            and node.name is seen[4]
            for node, seen in zip(nodes, self._seen, strict=True)
        )

    def _dominators(self, *, reverse: bool) -> dict[GraphNode, GraphNode]:
        found = graph_paths.immediate_dominators(self.graph_module.graph, reverse=reverse)
        return {self[name]: self[dominator] for name, dominator in found.items()}

    def _node(self, value: Given) -> fx.Node:
        """Return the node that is meant by one of these objects, a node, or a name."""
        if isinstance(value, (str, fx.Node)):
            return self[value].fx_node
        if not isinstance(value, GraphNode):
            raise FxkitError(
                f"expected a node of the graph or its name, got {type(value).__name__}",
                hint="take one from fxkit.graph(gm), such as fxkit.graph(gm)['relu']",
            )
        return self._view(value.fx_node).fx_node

    def _view(self, node: fx.Node) -> GraphNode:
        view = self._views.get(node)
        if view is None:
            raise InvalidGraphError(
                f"expected the graph as it was when fxkit.graph was called, got a new %{node.name}",
                hint="call fxkit.graph(gm) again after a change",
            )
        return view

    def _wrap(self, value: Any) -> Any:
        view: Any = self._view
        return map_arg(value, view)

    def _in_order(self, nodes: Iterable[fx.Node]) -> list[GraphNode]:
        return [self._view(node) for node in sorted(nodes, key=self._position.__getitem__)]

    def _similar(self, name: str) -> str:
        import difflib

        close = difflib.get_close_matches(name, self._by_name, n=3)
        return f"did you mean {', '.join(close)}?" if close else "print the graph to see its names"


def graph(gm: fx.GraphModule | GraphProgram) -> Graph:
    """Return read-only objects over the nodes of a graph.

    The objects are kept with the graph and built anew when it has changed, however it was changed.

    Args:
        gm: The module whose graph to look at; or a captured program, whose graph that ran last is.

    Returns:
        The graph as objects; printed, it is the graph's text.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
        >>> fxkit.graph(gm).find(torch.relu)
        [%_1 = aten.relu(%_0)]

    Raises:
        UnsupportedError: When it is no `GraphModule`.
    """
    gm = graph_module_of(gm)
    cached = gm.graph.__dict__.get(_CACHE)
    if cached is not None and cached.graph_module is gm and cached.is_current():
        return cached
    fresh = Graph(gm)
    gm.graph.__dict__[_CACHE] = fresh
    return fresh
