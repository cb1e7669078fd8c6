"""How much error each quantised operator adds, and how much it carries from those before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxkit.analysis.objects import GraphNode, graph
from fxkit.errors import UnsupportedError
from fxkit.ir.op import operator_of
from fxkit.ir.text_table import table
from fxkit.passes.properties import is_dequantised
from fxkit.quantization.affine import decibels
from fxkit.quantization.batches import Batch, arguments_of, call_with, checked_batches
from fxkit.quantization.preparation import (
    PreparedProgram,
    Program,
    buffers_kept,
    graph_module_of,
    model_of,
)
from fxkit.tracing.captured import Captured

_NAMESPACE = "quantized_decomposed."


@dataclass(frozen=True)
class ComparedOperator:
    """One operator that takes quantised operands; each figure in dB, more is better.

    Attributes:
        node: Name of its node.
        operator: Its name.
        source: The user's line, or None.
        total: Its result in the quantised program against that in the float program.
        added: Its result for the float program's activations: the error of its own quantisation.
        by_activations: The same with its weight in float; inf where it takes none quantised.
        by_weight: The same with its activations in float; inf where its weight is.
    """

    node: str
    operator: str
    source: str | None
    total: float
    added: float
    by_activations: float
    by_weight: float


@dataclass(frozen=True)
class QuantizationComparison:
    """What `compare` found.

    Attributes:
        rows: In the order of the graph.
    """

    rows: tuple[ComparedOperator, ...]

    @property
    def worst(self) -> ComparedOperator | None:
        """The operator whose own quantisation costs most; None where none is quantised."""
        return min(self.rows, key=lambda row: row.added, default=None)

    def table(self) -> str:
        """Return a row for each operator, in the order of the graph."""
        headers = [
            "node",
            "operator",
            "total dB",
            "added dB",
            "by activations",
            "by weight",
            "from",
        ]
        rows = [
            [
                row.node,
                row.operator,
                *(f"{value:.1f}" for value in _figures(row)),
                row.source or "",
            ]
            for row in self.rows
        ]
        worst = self.worst
        last = f"\n%{worst.node} adds most: {worst.added:.1f} dB" if worst is not None else ""
        return table(headers, rows, align="<<>>>><") + last

    def __str__(self) -> str:
        return self.table()


def compare(
    exact: PreparedProgram | Program, quantized: Program, batches: Iterable[Batch]
) -> QuantizationComparison:
    """Tell which operators of a quantised program cost most, and whether weights or activations do.

    Both graphs are run node by node in eager mode, and each operator several times.

    Args:
        exact: What was prepared, or the graph or captured program in float that was converted: its
            nodes have the same names.
        quantized: What `convert` returned.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.

    Raises:
        UnsupportedError: When there are no batches, or the programs have no quantised operator in
            common.
    """
    program = exact.remake() if isinstance(exact, PreparedProgram) else exact
    found: dict[fx.Node, _Noise] = {}
    operators: dict[fx.Node, GraphNode] = {}
    batch = None
    with torch.no_grad(), buffers_kept(model_of(program)):
        for batch in checked_batches(batches):
            before, after = _graph_for(program, batch), _graph_for(quantized, batch)
            floats = {node.name: node for node in before.graph.nodes}
            ours = {
                node.fx_node: node
                for node in graph(after)
                if node.name in floats and _takes_quantized(node)
            }
            operators |= ours
            noises = {node: found.setdefault(node, _Noise()) for node in ours}
            _compare_batch((before, floats), after, batch, noises)
    if batch is None:
        raise UnsupportedError("expected some batches to compare with, got none")
    if not found:
        raise UnsupportedError(
            "expected two programs with quantised operators in common, got none",
            hint="give what was prepared, and what convert made of it",
        )
    return QuantizationComparison(tuple(_row(operators[node], found[node]) for node in found))


def _graph_for(program: Program, batch: Batch) -> fx.GraphModule:
    """Return the graph that serves a batch."""
    if isinstance(program, Captured):
        call_with(program, batch)
    return graph_module_of(program)


def _figures(row: ComparedOperator) -> tuple[float, ...]:
    return row.total, row.added, row.by_activations, row.by_weight


def _takes_quantized(node: GraphNode) -> bool:
    """Tell whether a node takes a dequantised operand and is no quantising operator itself."""
    one = node.fx_node
    takes = any(map(_is_of_quantization, one.all_input_nodes))
    return takes and not _is_of_quantization(one) and one.op != "output"


def _is_of_quantization(node: fx.Node) -> bool:
    operator = operator_of(node)
    if operator is not None and operator.name.startswith(_NAMESPACE):
        return True
    return is_dequantised(node)


@dataclass
class _Noise:
    """Powers, summed over batches: of the signal, and of what four results differ from it by."""

    signal: float = 0.0
    total: float = 0.0
    added: float = 0.0
    by_activations: float = 0.0
    by_weight: float = 0.0


def _row(node: GraphNode, noise: _Noise) -> ComparedOperator:
    return ComparedOperator(
        node.name,
        node.operator or "",
        None if node.source is None else str(node.source),
        decibels(noise.signal, noise.total),
        decibels(noise.signal, noise.added),
        decibels(noise.signal, noise.by_activations),
        decibels(noise.signal, noise.by_weight),
    )


def _compare_batch(
    before: tuple[fx.GraphModule, Mapping[str, fx.Node]],
    after: fx.GraphModule,
    batch: Batch,
    found: Mapping[fx.Node, _Noise],
) -> None:
    exact = _values(before[0], batch)
    actual = _values(after, batch)
    for node, noise in found.items():
        wanted = exact[node.name]
        if not isinstance(wanted, Tensor):
            continue
        noise.signal += _power(wanted)
        noise.total += _power(wanted, actual[node.name])
        alone = _Alone(after, exact, node, before[1][node.name])
        noise.added += _power(wanted, alone.run())
        noise.by_activations += _power(wanted, alone.run(floats="weights"))
        noise.by_weight += _power(wanted, alone.run(floats="activations"))


def _power(exact: Tensor, other: Tensor | None = None) -> float:
    difference = exact.double() if other is None else exact.double() - other.double()
    return float(difference.square().sum())


class _Recording(fx.Interpreter):
    """Runs a graph and keeps the value of each node by its name."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and keep its value."""
        value = self.values[n.name] = super().run_node(n)
        return value


def _values(gm: fx.GraphModule, batch: Batch) -> dict[str, Any]:
    args, kwargs = arguments_of(batch)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    named = [kwargs[str(node.target)] for node in inputs[len(args) :] if node.target in kwargs]
    recording = _Recording(gm)
    recording.run(*args, *named)
    return recording.values


@dataclass
class _Alone:
    """Runs one operator of the quantised graph on the values of the float graph.

    Attributes:
        gm: The quantised graph.
        exact: Values of the float graph by the names of its nodes.
        node: The operator.
        before: The same in the float graph.
    """

    gm: fx.GraphModule
    exact: Mapping[str, Any]
    node: fx.Node
    before: fx.Node
    _made: dict[fx.Node, Any] = field(default_factory=dict)

    def run(self, floats: str = "") -> Any:
        """Return the operator's result; `weights` or `activations` are left in float."""
        partners = dict(zip(_operands(self.node), _operands(self.before), strict=True))

        def operand(one: fx.Node) -> Any:
            partner = partners[one]
            kind = "weights" if partner.op == "get_attr" else "activations"
            is_left = _is_of_quantization(one) and floats == kind
            return self.exact[partner.name] if is_left else self._value(one)

        args, kwargs = map_arg((self.node.args, dict(self.node.kwargs)), operand)
        return getattr(fx.Interpreter(self.gm), self.node.op)(self.node.target, args, kwargs)

    def _value(self, node: fx.Node) -> Any:
        """Return a value: the float graph's, or that of what quantises one of them."""
        if not _is_of_quantization(node) and node.name in self.exact:
            return self.exact[node.name]
        if node not in self._made:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), self._value)
            run = getattr(fx.Interpreter(self.gm), node.op)
            self._made[node] = run(node.target, args, kwargs)
        return self._made[node]


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a node in their order, each as often as it is taken."""
    found: list[fx.Node] = []

    def take(one: fx.Node) -> fx.Node:
        found.append(one)
        return one

    map_arg((node.args, dict(node.kwargs)), take)
    return found
