"""Types of all nodes of a graph, found once and then kept true by the journals of edits.

The type of most calls follows from a key: what is called and what is known of its operands
(`type_keys`). Such a call runs once, on a few zeros (`real_runs`) or on fake tensors, and its
result is remembered. Other calls (unknown functions, writes that change a tensor's own shape, sizes
that the data decide) run on live fake tensors, which keep memory and history; so does every node
that may share memory with their operands, and no other (`type_evaluation`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.effects import AliasSets
from fxkit.analysis.type_inference.declared_types import without_numbers
from fxkit.analysis.type_inference.fake_tensors import fake_mode, tensors_of, without_log
from fxkit.analysis.type_inference.symbolic_shapes import SymbolicShapes
from fxkit.analysis.type_inference.type_errors import finder
from fxkit.analysis.type_inference.type_evaluation import Evaluation
from fxkit.analysis.type_inference.type_facts import fake_value, symbols_in, types_of
from fxkit.analysis.type_inference.type_keys import is_address
from fxkit.analysis.type_inference.type_modes import read_modes
from fxkit.analysis.type_inference.type_observations import Observations, is_foreign
from fxkit.analysis.type_inference.type_records import NeedsLive, Record
from fxkit.errors import FxkitError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.graph_arguments import check_graph_module, check_inputs
from fxkit.ir.journal import GraphChange
from fxkit.ir.modes import without_modes
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import KEY, TensorType, set_type, type_of, type_of_value
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fx_graphs import flattens_inputs
from fxkit.torch_adapters.fx_nodes import input_nodes_of, is_erased
from fxkit.torch_adapters.tensors import impl_address_of

__all__ = ["TypeAnalysis", "fake_mode", "fake_value", "infer_type", "propagate_types"]

_TRIES = 8  # sweeps that may each find more to run live, before everything is run so


def propagate_types(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> Any:
    """Record the type of every node for inputs like the given ones.

    Effects do not happen: writes go to fake copies, nothing random is drawn from torch's generator,
    prints inside opaque calls do happen when such a call can run on fake tensors at all. A number
    that is read out of a tensor keeps the value that was recorded at capture; one that was not
    recorded, and a size that the data decide, is a symbol such as `u0`.

    Args:
        gm: The module; each node's `type_of` is set.
        args: Example inputs; tensors may be real, fake or on the meta device.
        kwargs: Example keyword inputs.
        dynamic_shapes: Which sizes are free, in the notation of `torch.export.export`: by input,
            None or a dict from axis to `Dim`. Their types hold expressions: `f32[batch,2*batch+1]`.

    Returns:
        The type of the output, nested as the output is.

    Raises:
        InvalidGraphError: When a node can't take its operands, naming node, source line and types.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x, y: torch.relu(x) @ y)
        >>> print(fxkit.propagate_types(gm, (torch.ones(2, 3), torch.ones(3, 5))))
        f32[2,5]
        >>> print(fxkit.graph(gm)["relu"].type)
        f32[2,3]
    """
    with without_modes():
        return TypeAnalysis(gm, args, kwargs, dynamic_shapes=dynamic_shapes).output_type


class TypeAnalysis:
    """The types of all nodes for inputs like the given ones, kept true while the graph is edited.

    Cost: some 10 µs a node at first, and a run on a few zeros or on fake tensors for each call
    whose like was not seen before. An update costs as much for each node that it visits: those that
    changed, and those after them as far as types change. Where calls run on live tensors, a change
    among those nodes means a run from scratch.

    Args:
        gm: The module; each node's `type_of` is set.
        args: Example inputs; tensors may be real, fake or on the meta device.
        kwargs: Example keyword inputs.
        dynamic_shapes: Which sizes are free, in the notation of `torch.export.export`.

    Raises:
        InvalidGraphError: When a node can't take its operands, naming node, source line and types.
        UnsupportedError: When `gm` is no `GraphModule`, or `args` no inputs of it.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x: torch.relu(x.sin()).sum(1).cos())
        >>> types = fxkit.TypeAnalysis(gm, (torch.randn(2, 3),))
        >>> types.visited
        6
        >>> relu = fxkit.graph(gm)["relu"].fx_node
        >>> with fxkit.edit(gm) as e:
        ...     e.replace(relu, e.call(torch.tanh, *relu.args, before=relu))
        >>> types.update(e.journal)
        2
        >>> print(types.output_type)
        f32[2]
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        dynamic_shapes: Any = None,
    ) -> None:
        check_graph_module(gm)
        check_inputs(gm, args, kwargs)
        self._gm = gm
        self._args, self._kwargs = tuple(args), dict(kwargs or {})
        self._dynamic_shapes = dynamic_shapes
        self._modes = read_modes()
        self._now: Evaluation
        self.run()

    @property
    def visited(self) -> int:
        """How many nodes the latest run or update looked at."""
        return self._now.visited

    @property
    def output_type(self) -> Any:
        """The type of what the graph returns, nested as it is."""
        return type_of(next(iter(reversed(self._gm.graph.nodes))))

    @property
    def origins(self) -> dict[str, str]:
        """For each symbol that the data decide, who finds it: `found in the data by %nonzero`."""
        return {name: finder(node) for name, node in self._now.origins.items()}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was taken to hold of symbolic sizes on the way, such as `batch <= 512`."""
        return () if self._now.symbolic is None else self._now.symbolic.assumptions()

    @property
    def relations(self) -> list[tuple[Symbol, fx.Node | None]]:
        """The assumptions as expressions, each with the node that made it necessary."""
        return [] if self._now.symbolic is None else self._now.symbolic.relations()

    def run(self) -> None:
        """Find all types from scratch.

        Raises:
            InvalidGraphError: When a node can't take its operands.
        """
        before = Observations(self._gm.graph)
        try:
            with self._modes.active(), without_log():
                self._now = self._swept(before)
        except BaseException:
            before.restore()
            raise

    def _swept(self, before: Observations) -> Evaluation:
        """Sweep, and sweep again as long as that shows more nodes that have to run live."""
        nodes = self._gm.graph.nodes
        live = {node for node in nodes if is_foreign(node)}
        is_symbolic = self._dynamic_shapes is not None
        for attempt in range(_TRIES + 1):
            self._modes.enter()
            sharers = self._sharers(live) if attempt < _TRIES else set(nodes)
            now = self._evaluation(sharers, is_symbolic, before)
            try:
                with torch.random.fork_rng([]):
                    missed = now.sweep()
            except NeedsLive as error:
                missed = [error.node]
                is_symbolic |= error.about_data
                if error.about_data:
                    missed += now.constants_behind(error.node)
            if not missed:
                break
            live.update(missed)
        return now

    def update(self, changes: Iterable[GraphChange] | None = None) -> int:
        """Bring the types up to date after edits.

        Args:
            changes: The journal of the edits. When left out, each node is compared with what it was
                when it was visited, which also finds what was undone or changed by other means.

        Returns:
            How many nodes were visited.

        Raises:
            InvalidGraphError: When a node can't take its operands.
        """
        changed = self._unlike() if changes is None else self._named_by(changes)
        if changed is None or any(self._is_bound(node) for node in changed):
            self.run()
            return self.visited
        self._now.visited = 0
        before: list[tuple[fx.Node, Record | None, Any]] = []
        try:
            with without_log():
                self._follow(changed, before)
        except NeedsLive:
            self._take_back(before)
            self.run()
        except BaseException:
            self._take_back(before)
            raise
        return self.visited

    def _evaluation(
        self, live_nodes: set[fx.Node], is_symbolic: bool, before: Observations
    ) -> Evaluation:
        symbolic = SymbolicShapes() if is_symbolic else None
        inputs = self._inputs()
        if symbolic is not None and self._dynamic_shapes is not None:
            inputs = symbolic.inputs(inputs, self._dynamic_shapes)
        return Evaluation(self._gm, inputs, self._modes, live_nodes, before, symbolic)

    def _inputs(self) -> dict[str, Any]:
        """Return the value of each placeholder that is given one."""
        placeholders = [node for node in self._gm.graph.nodes if node.op == "placeholder"]
        args = list(self._args)
        if flattens_inputs(self._gm.graph):
            leaves = pytree.tree_leaves((self._args, self._kwargs))
            args = leaves if len(leaves) == len(placeholders) else args
        inputs: dict[str, Any] = {}
        for index, node in enumerate(placeholders):
            target = str(node.target)
            if target.startswith("*"):
                inputs[node.name] = args[index:]
                args = args[:index]
            elif index < len(args):
                inputs[node.name] = args[index]
            elif target in self._kwargs:
                inputs[node.name] = self._kwargs[target]
        return inputs

    def _sharers(self, live: set[fx.Node]) -> set[fx.Node]:
        """Return the nodes that may share memory with those to run live, or with their operands."""
        if not live:
            return set()
        sets = AliasSets(self._gm.graph)
        self._join_inputs(sets)
        roots = {sets.root(part) for node in live for part in (node, *input_nodes_of(node))}
        nodes = self._gm.graph.nodes
        return {node for node in nodes if node.op != "output" and sets.root(node) in roots}

    def _join_inputs(self, sets: AliasSets) -> None:
        """Let inputs that share memory, among each other or with parameters, share a set."""
        inputs, first = self._inputs(), {}
        for node in self._gm.graph.nodes:
            value = inputs.get(node.name) if node.op == "placeholder" else None
            if node.op == "get_attr":
                value = find_attribute(self._gm, str(node.target))
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                    sets.join(node, first.setdefault(impl_address_of(leaf.untyped_storage()), node))

    # Following changes.

    def _unlike(self) -> list[fx.Node]:
        """Return the nodes that are not as they were when they were visited."""
        records, nodes = self._now.records, self._gm.graph.nodes
        found = [
            node
            for node in nodes
            if (record := records.get(node)) is None
            or not record.fits(node)
            or KEY not in node.meta
        ]
        fresh = sum(node not in records for node in found)
        if len(records) + fresh > len(nodes):
            present = set(nodes)
            found += [node for node in records if node not in present]
        return found

    def _named_by(self, changes: Iterable[GraphChange]) -> list[fx.Node] | None:
        """Return the nodes that a journal names; None when it says that all may have changed."""
        found: dict[fx.Node, None] = {}
        for change in changes:
            moved = change.kind == "move" and (self._now.live_nodes or self._now.switches)
            if change.kind == "adopt" or moved:
                return None
            if change.kind in ("insert", "erase", "rewire") and change.node is not None:
                found[change.node] = None
        return list(found)

    def _is_bound(self, node: fx.Node) -> bool:
        """Tell whether a changed node is one on whose place and memory other types depend."""
        now = self._now
        if node in now.live_nodes or node in now.switches:
            return True
        return not is_erased(node) and is_foreign(node)

    def _follow(
        self, changed: Iterable[fx.Node], before: list[tuple[fx.Node, Record | None, Any]]
    ) -> None:
        """Visit changed nodes and, in graph order, those whose operands got another type."""
        now, graph = self._now, self._gm.graph
        waiting: list[fx.Node] = []
        for node in changed:
            if not is_erased(node) and node.graph is graph:
                waiting.append(node)
            elif node in now.records:
                before.append((node, now.records[node], node.meta.get(KEY)))
                now.restore(node, None)
        queued = set(waiting)
        heapq.heapify(waiting)
        while waiting:
            node = heapq.heappop(waiting)
            if not now.live_nodes.isdisjoint(input_nodes_of(node)):
                raise NeedsLive(node)
            record = now.records.get(node)
            before.append((node, record, node.meta.get(KEY)))
            now.modes = now.modes_at(node)
            now.visit(node)
            if record is not None and is_same(record.value, now.values[node]):
                continue
            fresh = [user for user in node.users if user not in queued]
            queued.update(fresh)
            for user in fresh:
                heapq.heappush(waiting, user)

    def _take_back(self, before: list[tuple[fx.Node, Record | None, Any]]) -> None:
        """Let everything be as it was before nodes were visited."""
        for node, record, known in reversed(before):
            self._now.restore(node, record)
            if known is None:
                node.meta.pop(KEY, None)
            else:
                node.meta[KEY] = known


def is_same(before: Any, after: Any) -> bool:
    """Tell whether what is known of a value stayed."""
    return before is after or (type(before) is type(after) and bool(before == after))


def infer_type(node: fx.Node) -> Any:
    """Work out one node's type from its operands' recorded types, and record it.

    Returns:
        The type as `type_of` gives it; None when an operand's is not known or the operator can't
        run on fake tensors, and then nothing is recorded.
    """
    operands = node.all_input_nodes
    if node.op == "get_attr":
        found = find_attribute(node.graph.owning_module, str(node.target))
        known = type_of_value(found) if isinstance(found, torch.Tensor) else None
    elif node.op in ("placeholder", "output") or any(type_of(o) is None for o in operands):
        return type_of(node)
    else:
        known = _type_of_call(node)
    if known is not None:
        set_type(node, known)
    return known


def infer_missing_types(gm: fx.GraphModule) -> None:
    """Record the types of nodes that have none, where those of their operands are known.

    Opaque calls are not made for their types: they may happen only once. Cost: linear.
    """
    for node in gm.graph.nodes:
        if KEY not in node.meta and node.op != "output" and not is_foreign(node):
            infer_type(node)


def _type_of_call(node: fx.Node) -> Any:
    """Return the type of a call on fresh tensors of its operands' types, outside of autograd."""
    symbols = [symbol for o in input_nodes_of(node) for symbol in symbols_in(type_of(o))]
    root = node.graph.owning_module
    if symbols or root is None or is_foreign(node):
        return _run_on_fakes(node, symbols)
    with torch.no_grad(), without_log():
        nothing = Observations(fx.Graph())
        evaluation = Evaluation(root, {}, read_modes(), set(), nothing, None)
        table = evaluation.memory.table
        for operand in input_nodes_of(node):
            evaluation.values[operand] = table.of_types(type_of(operand))
        try:
            return types_of(evaluation.call(node))
        except (NeedsLive, FxkitError):
            return _run_on_fakes(node, symbols)


def _run_on_fakes(node: fx.Node, symbols: list[Symbol]) -> Any:
    """Run one call on fake tensors of its operands' types."""
    if is_address(node):
        return None
    root, target = node.graph.owning_module, node.target
    shape_env = next((s.node.shape_env for s in symbols if s.node is not None), None)
    with fake_mode(shape_env), torch.no_grad():
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: fake_value(type_of(n)))
        try:
            if callable(target):
                return type_of_value(target(*args, **kwargs))
            if node.op == "call_method":
                return type_of_value(getattr(args[0], target)(*args[1:], **kwargs))
            return type_of_value(_call_fake_module(find_attribute(root, target), args, kwargs))
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None


def _call_fake_module(module: Any, args: Any, kwargs: Any) -> Any:
    tensors = {name: fake_value(TensorType.of(t)) for name, t in tensors_of(module)}
    with without_numbers(module):
        return torch.func.functional_call(module, tensors, args, kwargs)
