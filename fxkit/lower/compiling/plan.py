"""The lowered graph: one call for each kernel, every other node unchanged."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import resolve
from fxkit.ir.provenance import derive
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.lower.compiling.lower_report import Region
from fxkit.lower.compiling.native_operators import native_call
from fxkit.lower.compiling.whole_operators import Choices, Choosing, choose_kernels
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.bias import with_bias
from fxkit.lower.families.products.regions import alone, followed_by
from fxkit.lower.fusion.candidates import operand_type, position_taken
from fxkit.lower.fusion.emit import Emitted, Operand, result_type
from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.fusion.kernel_faults import KernelFaults
from fxkit.lower.fusion.partitioner import FusionPlan
from fxkit.lower.library_calls.packed_linear import linear
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime.kernel_call import KernelCall


@dataclass
class Plan:
    """A partition made into a graph of kernel calls.

    Attributes:
        graph: The graph that runs.
        kernels: Name in the C++ text → kernel; equal regions share one.
        calls: Region name → the call of its kernel.
        regions: What became of each candidate.
        reason: Why eager runs the whole graph, or None.
        has_packed: Whether the library multiplies by weights that were packed once.
        has_native: Whether operators are called that have a kernel of their own.
    """

    graph: fx.Graph
    kernels: dict[str, Kernel] = field(default_factory=dict)
    calls: dict[str, KernelCall] = field(default_factory=dict)
    kernel_of: dict[str, str] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    reason: str | None = None
    has_packed: bool = False
    has_native: bool = False


def make_plan(
    gm: fx.GraphModule,
    partition: FusionPlan,
    choices: Choices | None = None,
    make_call: Callable[..., KernelCall] = KernelCall,
) -> Plan:
    """Return the graph that runs a partition; its kernels are not built yet.

    Args:
        gm: The module.
        partition: Its regions.
        choices: Which products and attentions kernels compute; what is fastest when left out.
        make_call: Makes the call of a kernel.
    """
    if choices is None:
        choices = choose_kernels(gm, partition.steps, Choosing.by_speed(), KernelFaults())
    return _Planner(gm, partition, choices, make_call).run()


class _Planner:
    def __init__(
        self,
        gm: fx.GraphModule,
        partition: FusionPlan,
        choices: Choices,
        make_call: Callable[..., KernelCall],
    ) -> None:
        self._gm = gm
        self._make_call = make_call
        self._partition = partition
        self._reasons = partition.reasons | choices.reasons
        self._position = {node: position for position, node in enumerate(gm.graph.nodes)}
        self._plan = Plan(fx.Graph(gm))
        self._names: dict[Kernel, str] = {}
        self._env: dict[fx.Node, fx.Node] = {}
        self._parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self._products = choices.products
        self._plan.has_packed = bool(self._products.packed)
        self._alone = choices.alone
        self._unbiased: dict[fx.Node, ProductNode] = {}
        self._with_biases: dict[int, Emitted] = {}
        for position, found in self._products.biased.items():
            self._take_biases(position, found)

    def _take_biases(self, position: int, products: Sequence[ProductNode]) -> None:
        """Let a region add the biases of what it reads, where it can."""
        emitted = self._partition.emitted[position]
        for product in products:
            added = with_bias(emitted, product)
            if added is not None:
                emitted = self._with_biases[position] = added
                self._unbiased[product.node] = product

    def run(self) -> Plan:
        products = self._products
        for position, step in enumerate(self._partition.steps):
            if isinstance(step, FusionGroup):
                self._add_group(step, position)
            elif step in self._unbiased:
                self._copy_without_bias(self._unbiased[step])
            elif step in products.packed:
                self._copy_packed(step)
            elif step in self._alone:
                emitted = self._alone[step]
                self._call(emitted, [step], (step.name,), self._traffic_of(step, emitted.inputs))
            elif (call := native_call(step)) is not None:
                self._call_natively(step, call)
            elif step not in products.found:
                self._copy(step)
            elif not products.is_deferred(step):
                self._add_product(products.found[step])
        left = sorted(self._reasons, key=self._position.__getitem__)
        for node in left:
            self._plan.regions.append(
                Region(node.name, (node.name,), None, self._reasons[node], None)
            )
        return self._plan

    def _copy(self, node: fx.Node) -> None:
        position = position_taken(node)
        part = None if position is None else self._parts.get((node.all_input_nodes[0], position))
        if part is None:
            part = self._plan.graph.node_copy(node, self._env.__getitem__)
        self._env[node] = part

    def _call_natively(self, node: fx.Node, call: KernelCall) -> None:
        """Call the kernel that an operator has."""
        self._plan.has_native = True
        graph = self._plan.graph
        operands = (self._input(o) for o in node.args if isinstance(o, fx.Node))
        made = graph.call_function(call, tuple(operands))
        derive(made, [node], call.__name__)
        set_type(made, call.outputs[0] if len(call.outputs) == 1 else call.outputs)
        parts = [made]
        if len(call.outputs) > 1:
            parts = [
                graph.call_function(operator.getitem, (made, place))
                for place in range(len(call.outputs))
            ]
        if isinstance(type_of(node), tuple):
            self._parts.update({(node, place): part for place, part in enumerate(parts)})
        else:
            self._env[node] = parts[0]

    def _copy_without_bias(self, product: ProductNode) -> None:
        """Multiply as a node does, but leave its bias to the region that reads it."""
        node = product.node
        left, right = map(self._input, product.operands[:2])
        call = resolve(node)
        is_turned = call is not None and call.name == "aten.linear"
        multiply = torch.nn.functional.linear if is_turned else torch.mm
        self._put(node, linear if node in self._products.packed else multiply, (left, right))

    def _copy_packed(self, node: fx.Node) -> None:
        """Let the library multiply by a weight that was packed once."""
        call = resolve(node)
        assert call is not None
        operands = (call.arguments[name] for name in ("input", "weight", "bias"))
        self._put(node, linear, tuple(o if o is None else self._input(o) for o in operands))

    def _put(self, node: fx.Node, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Compute a node's value by another function."""
        copied = self._plan.graph.call_function(function, args)
        copied.meta = dict(node.meta)
        self._env[node] = copied

    def _add_group(self, group: FusionGroup, position: int) -> None:
        """Add a group's kernel; with it the product that only the group reads, where they fit."""
        inside = [*(m.node for m in group.members), *group.aliases]
        inside.sort(key=self._position.__getitem__)
        product = self._products.followed.get(position)
        emitted = self._with_biases.get(position) or self._partition.emitted[position]
        joined = followed_by(product, emitted) if product else None
        if product is not None and joined is None:
            self._add_product(product)
        names = tuple(n.name for n in inside if n not in group.aliases)
        traffic = _traffic(group)
        if product is None or joined is None:
            self._call(emitted, inside, names, traffic)
        else:
            traffic += self._traffic_of(product.node, product.operands)
            self._call(joined, [product.node, *inside], (product.node.name, *names), traffic)
        self._repeat_views(group, inside)

    def _add_product(self, product: ProductNode) -> None:
        """Add a kernel that computes a product alone."""
        node = product.node
        traffic = self._traffic_of(node, product.operands)
        self._call(alone(product), [node], (node.name,), traffic)

    def _traffic_of(self, node: fx.Node, operands: Iterable[Operand]) -> int:
        """Return the bytes that eager reads and writes for one node."""
        types = [self._type_of(operand) for operand in operands]
        return sum(map(_bytes, types)) + _bytes(result_type(node, 0))

    def _type_of(self, operand: Operand) -> TensorType:
        """Return the type of what a kernel reads."""
        return type_of(operand) if isinstance(operand, fx.Node) else operand_type(operand, self._gm)

    def _call(
        self, emitted: Emitted, inside: list[fx.Node], names: tuple[str, ...], traffic: int
    ) -> None:
        """Add the call of a kernel, and a node for each of its results."""
        plan = self._plan
        kernel = self._names.setdefault(emitted.kernel, f"kernel_{len(self._names)}")
        plan.kernels[kernel] = emitted.kernel
        name = f"region_{len(plan.calls)}"
        inputs = [self._type_of(operand) for operand in emitted.inputs]
        results = [result_type(*output) for output in emitted.outputs]
        eager = _Eager(self._gm, emitted, inside, self._unbiased)
        call = self._make_call(name, emitted.kernel, inputs, results, eager)
        plan.calls[name], plan.kernel_of[name] = call, kernel
        node = plan.graph.call_function(call, tuple(self._input(o) for o in emitted.inputs))
        derive(node, inside, name)
        set_type(node, results[0] if len(results) == 1 else tuple(results))
        for place, (member, position) in enumerate(emitted.outputs):
            value = node
            if len(results) > 1:
                value = plan.graph.call_function(operator.getitem, (node, place))
            if isinstance(type_of(member), tuple):
                self._parts[member, position] = value
            else:
                self._env[member] = value
        plan.regions.append(
            Region(
                name,
                names,
                kernel,
                None,
                traffic - sum(map(_bytes, (*inputs, *results))),
            )
        )

    def _input(self, operand: Operand) -> fx.Node:
        if isinstance(operand, fx.Node):
            return self._env[operand]
        return self._plan.graph.get_attr(operand.path)

    def _repeat_views(self, group: FusionGroup, inside: Iterable[fx.Node]) -> None:
        """Make the views of a region's results that are used outside of it."""
        wanted = {
            alias
            for alias in group.aliases
            if any(not group.computes(user) for user in alias.users)
        }
        for alias in list(wanted):
            while (alias := group.aliases[alias]) in group.aliases:
                wanted.add(alias)
        for node in inside:
            if node in wanted:
                self._copy(node)


def _traffic(group: FusionGroup) -> int:
    """Return the bytes that eager reads and writes for a group, operator by operator."""
    total = 0
    for member in group.members:
        total += sum(map(_bytes, member.types))
        total += sum([_bytes(member.operand_types[t]) for t in member.tensors])
    return total


def _bytes(known: TensorType) -> int:
    """Return the bytes that a tensor's distinct elements take."""
    count = known.dtype.itemsize
    for size, stride in zip(known.shape, known.stride or known.shape, strict=True):
        count *= size if stride else 1
    return count


class _Eager:
    """Computes a region with torch, from the same inputs; made when it is first needed."""

    def __init__(
        self,
        gm: fx.GraphModule,
        emitted: Emitted,
        inside: list[fx.Node],
        unbiased: Mapping[fx.Node, ProductNode],
    ) -> None:
        self._gm = gm
        self._emitted = emitted
        self._inside = inside
        self._unbiased = unbiased
        self._run: Callable[..., Any] | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._run is None:
            self._run = python_function(self._graph())
        return self._run(self._gm, *tensors)

    def _graph(self) -> fx.Graph:
        graph = fx.Graph(self._gm)
        given = {o: graph.placeholder(f"input_{n}") for n, o in enumerate(self._emitted.inputs)}
        env = {operand: value for operand, value in given.items() if isinstance(operand, fx.Node)}
        for node in env.keys() & self._unbiased.keys():
            bias = given[self._unbiased[node].operands[-1]]
            env[node] = graph.call_function(torch.add, (env[node], bias))
        for node in self._inside:
            env[node] = graph.node_copy(node, env.__getitem__)
        results = [
            graph.call_function(operator.getitem, (env[node], position))
            if isinstance(type_of(node), tuple)
            else env[node]
            for node, position in self._emitted.outputs
        ]
        graph.output(results[0] if len(results) == 1 else tuple(results))
        return graph


def python_function(graph: fx.Graph) -> Callable[..., Any]:
    """Return a graph as a function of the module that owns its attributes, and its inputs.

    Nothing is copied: parameters are read from the module at each call.
    """
    code = graph.python_code(root_module="self")
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<fxkit kernels>", "exec"), namespace)
    return namespace["forward"]
