"""A captured graph with everything that it reads as an input, and what happens around its tensors.

Functional ATen knows no writes, no views of inputs and no Python values. What a graph has of those
is taken apart here: results that are views are made again from what they are views of, guards on
values and texts come after the run, written inputs get their new content last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.ir.attributes import find_attribute
from fxkit.ir.names import append_placeholder, keep_module_name
from fxkit.tracing.functional.observation import SIDE_NODES, GraphObservation, is_read, observe
from fxkit.tracing.functional.sized_runs import SizedRun
from fxkit.tracing.values.refusals import Refusal

INPUT, VALUE, TAIL = "input", "value", "tail"


@dataclass(frozen=True, slots=True)
class Result:
    """Where one result of a program comes from.

    Attributes:
        kind: `input`, `value` of the functional graph, or `tail`: a view of one of those.
        index: Its number there.
    """

    kind: str
    index: int


@dataclass(slots=True)
class FlatProgram:
    """A captured graph, taken apart into what functional ATen holds and what lies around it.

    Attributes:
        graph_module: The graph; parameters and buffers are placeholders behind the arguments.
        attributes: The names of those.
        observation: What a run on fake tensors has shown.
        values: What the functional graph has to compute: results, or what they are views of.
        given: Those of the values that results with a gradient are, or are views of.
        read: What guards look at, as it is when they do; computed behind `values`.
        results: Where each result comes from.
        reshape: Changes the shapes of inputs in place; None where none is changed.
        tail: Makes the views, from the inputs and then the values; None where there are none.
        checks: Checks guards and writes texts, from the inputs, the values and what is read; None
            where there are none.
        is_single: Whether it gives one tensor and no tuple.
    """

    graph_module: fx.GraphModule
    attributes: tuple[str, ...]
    observation: GraphObservation
    values: tuple[fx.Node, ...] = ()
    given: frozenset[fx.Node] = frozenset()
    read: tuple[fx.Node, ...] = ()
    results: tuple[Result, ...] = ()
    reshape: Callable[..., Any] | None = None
    tail: Callable[..., tuple[Any, ...]] | None = None
    checks: Callable[..., Any] | None = None
    is_single: bool = False

    @property
    def mutated(self) -> tuple[int, ...]:
        """Positions of the inputs that are written to."""
        return self.observation.mutated

    @property
    def copied(self) -> tuple[int, ...]:
        """Positions of the inputs that the functional graph works on copies of."""
        return tuple(sorted({*self.mutated, *self.observation.reshaped}))

    @property
    def is_differentiable(self) -> tuple[bool, ...]:
        """Whether autograd follows each of the values, and a result shows it."""
        followed = self.observation.followed & self.given
        return tuple(node in followed for node in self.values)

    def functional(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Compute the values and the new content of written inputs, on copies of those."""
        given = list(inputs)
        for position in self.copied:
            given[position] = given[position].clone()
        run = _Collector(self)
        run.run(*given)
        written = [given[position] for position in self.mutated]
        # Copies, since torch refuses what may be a view; they are dropped from the graph.
        values = map(_copied, run.values, self.is_differentiable)
        return [*values, *run.read, *written]


def _copied(value: torch.Tensor, is_differentiable: bool) -> torch.Tensor:
    with torch.set_grad_enabled(is_differentiable and torch.is_grad_enabled()):
        return value.clone()


class _Collector(SizedRun):
    """Runs a flat graph and collects what is wanted; Python values are not computed."""

    def __init__(self, flat: FlatProgram) -> None:
        super().__init__(flat.graph_module)
        self._flat = flat
        self._read = set(flat.read)
        self._kept: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.target in SIDE_NODES or is_read(n):
            return None
        value = super().run_node(n)
        if n in self._read:  # before it is written to
            self._kept[n] = value.detach().clone()
        return value

    @property
    def values(self) -> list[torch.Tensor]:
        return [self.env[node] for node in self._flat.values]

    @property
    def read(self) -> list[torch.Tensor]:
        return [self._kept[node] for node in self._flat.read]


def flatten(gm: fx.GraphModule, args: Sequence[torch.Tensor]) -> FlatProgram:
    """Take a captured graph apart.

    Args:
        gm: Calls of torch's functions and methods on tensors. It is not changed.
        args: Its inputs.

    Raises:
        Refusal: When it does what can't be had in functional form, with the reason.
    """
    if calls := gm.graph.find_nodes(op="call_module"):
        raise Refusal(f"%{calls[0].name} calls a module, whose inside is not part of the graph")
    flat, attributes = _lift(gm)
    tensors = [find_attribute(gm, name) for name in attributes]
    if not all(isinstance(value, torch.Tensor) for value in (*args, *tensors)):
        raise Refusal("an input or attribute is no tensor")
    observation = observe(flat, [*args, *tensors])
    return _Parts(flat, attributes, observation).program()


def _lift(gm: fx.GraphModule) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Copy a graph with each attribute that it reads as a placeholder behind the others."""
    graph = keep_module_name(fx.Graph())
    values: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, fx.Node] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        values[node] = graph.node_copy(node)
    for node in gm.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in attributes:
            attributes[name] = append_placeholder(graph, name.replace(".", "_"))
            attributes[name].meta.update(node.meta)
        values[node] = attributes[name]
    for node in gm.graph.nodes:
        if node not in values:
            values[node] = graph.node_copy(node, values.__getitem__)
    return fx.GraphModule({}, graph), tuple(attributes)


class _Parts:
    """Decides where each result comes from."""

    def __init__(
        self, gm: fx.GraphModule, attributes: tuple[str, ...], observation: GraphObservation
    ) -> None:
        self._gm = gm
        self._attributes = attributes
        self._observation = observation
        self._seen = observation.seen
        self._inputs = list(gm.graph.find_nodes(op="placeholder"))
        self._values: dict[fx.Node, None] = {}
        self._read: dict[fx.Node, None] = {}
        self._order = {node: position for position, node in enumerate(gm.graph.nodes)}
        self._changes = observation.shape_changes
        # Of each tensor, the node that first gave it alone.
        self._first: dict[int, fx.Node] = {}
        for node in self._order:
            if self._is_tensor(node):
                self._first.setdefault(self._seen[node].objects[0], node)

    def program(self) -> FlatProgram:
        """Return the program."""
        output = self._gm.graph.output_node().args[0]
        is_single = isinstance(output, fx.Node)
        outputs: list[Any] = [output] if is_single else list(output)  # type: ignore[arg-type]
        if not all(isinstance(node, fx.Node) and self._is_tensor(node) for node in outputs):
            raise Refusal("a result is no tensor")
        chains = {node: self._chain(node) for node in dict.fromkeys(outputs)}
        self._values = {chain[0]: None for chain in chains.values() if chain[0] not in self._inputs}
        tails = [node for node, chain in chains.items() if self._views(chain)]
        checks = [node for node in self._gm.graph.nodes if node.target in SIDE_NODES]
        followed = self._observation.followed
        program = FlatProgram(
            self._gm,
            self._attributes,
            self._observation,
            tuple(self._values),
            frozenset(chain[0] for node, chain in chains.items() if node in followed),
            is_single=is_single,
        )
        changed = [self._inputs[position] for position in program.copied]
        self._read = {
            operand: None
            for node in self._gm.graph.nodes
            if is_read(node)
            for operand in node.all_input_nodes
            if operand not in self._inputs or operand in changed
        }
        program.read = tuple(self._read)
        program.results = tuple(self._result(n, chains[n][0], tails) for n in outputs)
        program.reshape = self._reshape_function()
        program.tail = self._views_function(tails, [n for t in tails for n in chains[t][1:]])
        program.checks = self._checks(checks)
        return program

    def _is_tensor(self, node: fx.Node) -> bool:
        return node in self._seen and self._seen[node].is_tensor

    def _result(self, node: fx.Node, owner: fx.Node, tails: list[fx.Node]) -> Result:
        if node in tails:
            return Result(TAIL, tails.index(node))
        if owner in self._inputs:
            return Result(INPUT, self._inputs.index(owner))
        return Result(VALUE, list(self._values).index(owner))

    def _views(self, chain: list[fx.Node]) -> list[fx.Node]:
        return [node for node in chain[1:] if not self._gives_operand(node)]

    def _chain(self, node: fx.Node) -> list[fx.Node]:
        """Return the views that lead to a node, from what owns the memory."""
        memory = self._seen[node].memories[0]
        chain = [node]
        while chain[-1] not in self._inputs:
            before = self._owner(chain[-1], memory)
            if before is None:
                break
            chain.append(before)
        if not self._seen[chain[-1]].is_tensor:  # a call that gives several tensors of their own
            chain.pop()
        return list(reversed(chain))

    def _owner(self, node: fx.Node, memory: int | None = None) -> Any:
        """Return the operand whose memory a node's value lies in; None where there is none."""
        memory = self._seen[node].memories[0] if memory is None else memory
        operands = (n for n in node.all_input_nodes if n in self._seen)
        return next((n for n in operands if memory in self._seen[n].memories), None)

    def _gives_operand(self, node: fx.Node) -> bool:
        """Tell whether a node gives the very tensor, or tensors, that it was given."""
        objects, place = self._seen[node].objects, self._order[node]
        if objects and all(self._order.get(self._first.get(o), place) < place for o in objects):
            return True
        if effects_of(node).writes:
            raise Refusal(f"%{node.name} writes to a tensor and gives another one")
        return False

    def _key(self, node: fx.Node) -> Any:
        """Return what a node's value is known by: a tensor by its identity."""
        return self._seen[node].objects[0] if self._is_tensor(node) else node

    def _reshape_function(self) -> Callable[..., Any] | None:
        """Return the changes of the inputs' shapes as a function of the inputs."""
        inputs = [self._inputs[position] for position in self._observation.reshaped]
        changes = [change for node in inputs for change in self._changes[self._key(node)]]
        if not changes:
            return None
        graph, env = self._frame([])
        by_key = {self._key(node): value for node, value in env.items()}
        for change in self._in_order(changes):
            graph.node_copy(change, lambda node: by_key[self._key(node)])
        graph.output(())
        return _compiled(graph)

    def _views_function(
        self, results: list[fx.Node], chain: list[fx.Node]
    ) -> Callable[..., Any] | None:
        """Return the views among `chain` as a function of the inputs and then the values."""
        if not results:
            return None
        graph, given = self._frame(list(self._values))
        env = {self._key(node): value for node, value in given.items()}
        outside = frozenset(env)
        changes = [c for node in chain for c in self._changes.get(self._key(node), ())]
        for node in self._in_order([*chain, *changes]):
            key = self._key(node)
            if node in changes and key not in outside:
                graph.node_copy(node, lambda n: env[self._key(n)])
            elif key not in env and not self._gives_operand(node):
                self._check_view(node, env, outside)
                env[key] = graph.node_copy(node, lambda n: env[self._key(n)])
        graph.output(tuple(env[self._key(node)] for node in results))
        return _compiled(graph)

    def _check_view(self, node: fx.Node, env: dict[Any, fx.Node], outside: frozenset[Any]) -> None:
        keys = [self._key(operand) for operand in node.all_input_nodes]
        if not all(key in env for key in keys):
            raise Refusal(f"%{node.name} is a view that also depends on other tensors")
        later = (c for key in keys if key in outside for c in self._changes.get(key, ()))
        if any(self._order[change] > self._order[node] for change in later):
            raise Refusal(f"%{node.name} is a view of a tensor whose shape is changed afterwards")
        entry = self._seen[self._inputs[0]].has_grad_mode if self._inputs else True
        if self._seen[node].has_grad_mode is not entry:
            raise Refusal(f"%{node.name} is a view made where gradients are in another mode")

    def _checks(self, checks: list[fx.Node]) -> Callable[..., Any] | None:
        if not checks:
            return None
        graph, env = self._frame([*self._values, *self._read])
        env.update({node: env[_Copy(node)] for node in self._read})
        for node in self._gm.graph.nodes:
            if is_read(node) or node.target in SIDE_NODES:
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(())
        return _compiled(graph)

    def _frame(self, values: list[fx.Node]) -> tuple[fx.Graph, dict[Any, fx.Node]]:
        graph, env = fx.Graph(), {}
        for node in self._inputs:
            env[node] = graph.placeholder(node.name)
        for position, node in enumerate(values):
            placeholder = graph.placeholder(f"value_{position}")
            key = node if position < len(self._values) else _Copy(node)
            env[key] = placeholder
        return graph, env

    def _in_order(self, nodes: list[fx.Node]) -> list[fx.Node]:
        wanted = set(nodes)
        return [node for node in self._gm.graph.nodes if node in wanted]


@dataclass(frozen=True, slots=True)
class _Copy:
    """What a guard looks at: the content of a node's value at that point."""

    node: fx.Node


def _compiled(graph: fx.Graph) -> Callable[..., Any]:
    return fx.GraphModule({}, graph).forward
