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
    tail: Callable[..., tuple[Any, ...]] | None = None
    checks: Callable[..., Any] | None = None
    is_single: bool = False

    @property
    def mutated(self) -> tuple[int, ...]:
        """Positions of the inputs that are written to."""
        return self.observation.mutated

    @property
    def is_differentiable(self) -> tuple[bool, ...]:
        """Whether autograd follows each of the values, and a result shows it."""
        followed = self.observation.followed & self.given
        return tuple(node in followed for node in self.values)

    def functional(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Compute the values and the new content of written inputs, on copies of those."""
        given = list(inputs)
        for position in self.mutated:
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


class _Collector(fx.Interpreter):
    """Runs a flat graph and collects what is wanted; Python values are not computed."""

    def __init__(self, flat: FlatProgram) -> None:
        super().__init__(flat.graph_module, garbage_collect_values=False)
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
        mutated, followed = self._observation.mutated, self._observation.followed
        self._read = {
            operand: None
            for node in self._gm.graph.nodes
            if is_read(node)
            for operand in node.all_input_nodes
            if operand not in self._inputs or self._inputs.index(operand) in mutated
        }
        program = FlatProgram(
            self._gm,
            self._attributes,
            self._observation,
            tuple(self._values),
            frozenset(chain[0] for node, chain in chains.items() if node in followed),
            tuple(self._read),
            is_single=is_single,
        )
        program.results = tuple(self._result(n, chains[n][0], tails) for n in outputs)
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
        return [node for node in chain[1:] if not self._is_written(node)]

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

    def _is_written(self, node: fx.Node) -> bool:
        """Tell whether a node gives an operand that it has written to."""
        if not effects_of(node).writes:
            return False
        if self._seen[node].geometry != self._seen[self._owner(node)].geometry:
            raise Refusal(f"%{node.name} changes the shape of a tensor in place")
        return True

    def _views_function(
        self, results: list[fx.Node], chain: list[fx.Node]
    ) -> Callable[..., Any] | None:
        """Return the views among `chain` as a function of the inputs and then the values."""
        if not results:
            return None
        graph, env = self._frame(list(self._values))
        for node in self._in_order(chain):
            if self._is_written(node):
                env[node] = env[self._owner(node)]
            elif node not in env:
                self._check_view(node, env)
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[node] for node in results))
        return _compiled(graph)

    def _check_view(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> None:
        if not all(operand in env for operand in node.all_input_nodes):
            raise Refusal(f"%{node.name} is a view that also depends on other tensors")
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
