"""What was quantised, how, and what it costs: one row an operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxkit.analysis.objects import graph
from fxkit.errors import UnsupportedError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.text_table import table
from fxkit.quantization.affine import parameters_of, signal_to_noise
from fxkit.quantization.batches import Batch, call_with, checked_batches
from fxkit.quantization.placement import QuantizedOperator, placements
from fxkit.quantization.preparation import (
    PreparedProgram,
    as_prepared,
    buffers_kept,
    model_of,
)
from fxkit.quantization.sharing import makers
from fxkit.torch_adapters import pytree


@dataclass(frozen=True)
class QuantizationRow(QuantizedOperator):
    """One operator that can be quantised, and what its quantisation costs.

    Attributes:
        weight_sqnr: dB of the weight's signal over the error of its integers, or None.
        activation: The range and scale of its activations, as text.
        bytes_before: Bytes of the weight.
        bytes_after: Bytes of what is stored in its place.
        notes: What was odd about values in calibration.
    """

    weight_sqnr: float | None = None
    activation: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuantizationReport:
    """The rows of all operators that can be quantised, and the error of the results.

    Attributes:
        rows: In the order of the graph, and of other graphs where the program has several.
        sqnr: dB of each result's signal over the error, over all batches; empty without batches.
        bytes_before: Bytes of all weights of the rows; those that several rows share count once.
        bytes_after: Bytes of what is stored in their place, and of those that are read in floating
            point, too.
    """

    rows: tuple[QuantizationRow, ...]
    sqnr: tuple[float, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0

    def table(self) -> str:
        """Return the report as text, a row an operator."""
        head = ("node", "operator", "how", "activation", "weight dB", "bytes", "reason")
        lines = [
            (
                row.node,
                row.operator,
                row.how,
                row.activation,
                "" if row.weight_sqnr is None else f"{row.weight_sqnr:.1f}",
                f"{row.bytes_before:,} -> {row.bytes_after:,}" if row.bytes_before else "",
                "; ".join((row.reason, *row.notes)),
            )
            for row in self.rows
        ]
        return f"{table(head, lines, align='<<<<>>')}\n\n{self._summary()}"

    def _summary(self) -> str:
        done = sum(row.is_quantized for row in self.rows)
        sizes = f"{self.bytes_before:,} -> {self.bytes_after:,} B"
        found = f"{done} of {len(self.rows)} operators quantised, weights {sizes}"
        results = ", ".join(f"{one:.1f} dB" for one in self.sqnr)
        return f"{found}, results at {results}" if results else found

    def __str__(self) -> str:
        return self.table()


def report(
    quantized: Any, prepared: PreparedProgram, batches: Iterable[Batch] = ()
) -> QuantizationReport:
    """Tell how each operator is quantised or why not, and how far results are off.

    Args:
        quantized: What `convert` or `fxkit.compile` of it returned.
        prepared: What was converted: it computes what the float model does.
        batches: Inputs to compare results for: for each call a tuple of positional inputs, or a
            dict of keyword inputs.
    """
    errors = _errors(quantized, as_prepared(prepared), batches)
    rows: dict[tuple[object, ...], QuantizationRow] = {}
    sizes = _WeightSizes()
    for gm in prepared.graph_modules:
        nodes = {node.name: node for node in gm.graph.nodes}
        for placement in placements(gm, prepared.config):
            paths = tuple(str(nodes[one.producer].target) for one in placement.operands)
            key = placement.node, placement.operator, placement.source, paths
            if key not in rows:
                rows[key] = _row(prepared, gm, placement, nodes)
            sizes.add(gm, rows[key], nodes)
        sizes.add_floats(gm)
    return QuantizationReport((*rows.values(), *_never_run(prepared)), errors, *sizes.total())


def _never_run(prepared: PreparedProgram) -> Iterator[QuantizationRow]:
    """Return a row for each layer with a weight that no graph has: no batch has run it."""
    model = model_of(prepared.program)
    if model is None:
        return
    graphs = prepared.graph_modules
    ran = {node.module_path for gm in graphs for node in graph(gm)}
    read = {_place_of(value) for gm in graphs for value in _tensors_read(gm)}
    for path, module in model.named_modules():
        weights = [p for p in module.parameters(recurse=False) if _lies_in_memory(p)]
        matrices = [p for p in weights if p.is_floating_point() and p.dim() > 1]
        if matrices and path not in ran and read.isdisjoint(map(_place_of, matrices)):
            reason = "no batch has run it: calibrate with one that does, else it stays in float"
            yield QuantizationRow(path, type(module).__name__, None, (), reason)


def _tensors_read(gm: fx.GraphModule) -> Iterator[Tensor]:
    for node in gm.graph.find_nodes(op="get_attr"):
        value = find_attribute(gm, str(node.target))
        if _lies_in_memory(value):
            yield value


def _lies_in_memory(value: Any) -> bool:
    """Tell whether something is a tensor with an address, and none of a subclass's own kind."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided


class _WeightSizes:
    """Adds up the bytes of weights, each of which may be read by several operators."""

    def __init__(self) -> None:
        self._before: dict[_Place, int] = {}
        self._after: dict[object, int] = {}
        self._readers: set[tuple[fx.Node, str]] = set()

    def add(self, gm: fx.GraphModule, row: QuantizationRow, nodes: Mapping[str, fx.Node]) -> None:
        """Add the weight of an operator, if it has one that is quantised."""
        for operand in row.operands:
            if not operand.is_weight:
                continue
            read = nodes[operand.producer]
            weight = find_attribute(gm, str(read.target)).detach()
            place = _place_of(weight)
            self._before[place] = weight.nbytes
            self._after[place, operand.axis, operand.spec] = row.bytes_after
            self._readers.add((read, row.node))

    def add_floats(self, gm: fx.GraphModule) -> None:
        """Add the weights of a graph that operators in floating point read, too."""
        for read in gm.graph.find_nodes(op="get_attr"):
            weight = find_attribute(gm, str(read.target))
            if not isinstance(weight, Tensor) or _place_of(weight) not in self._before:
                continue
            if any((read, user.name) not in self._readers for user in read.users):
                self._after[_place_of(weight)] = weight.nbytes

    def total(self) -> tuple[int, int]:
        """Return the bytes before and after."""
        return sum(self._before.values()), sum(self._after.values())


_Place = tuple[int, tuple[int, ...]]


def _place_of(weight: Tensor) -> _Place:
    return weight.data_ptr(), tuple(weight.shape)


def _errors(
    quantized: Any, prepared: PreparedProgram, batches: Iterable[Batch]
) -> tuple[float, ...]:
    exact: list[list[Tensor]] = []
    found: list[list[Tensor]] = []
    fresh = prepared.remake()
    with torch.no_grad(), buffers_kept(model_of(prepared.program)):
        for batch in checked_batches(batches):
            exact.append(_float_tensors(call_with(fresh, batch)))
            found.append(_float_tensors(call_with(quantized, batch)))
            _check_alike(exact[-1], found[-1])
    pairs = zip(zip(*exact, strict=True), zip(*found, strict=True), strict=True)
    return tuple(signal_to_noise(_flat(ours), _flat(theirs)) for ours, theirs in pairs)


def _check_alike(exact: list[Tensor], found: list[Tensor]) -> None:
    shapes = [[tuple(one.shape) for one in results] for results in (exact, found)]
    if shapes[0] != shapes[1]:
        raise UnsupportedError(
            f"expected two programs with results of one shape, got {shapes[0]} and {shapes[1]}",
            hint="give what convert made, and what was prepared for it",
        )


def _float_tensors(result: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(result)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def _row(
    prepared: PreparedProgram,
    gm: fx.GraphModule,
    placement: QuantizedOperator,
    nodes: Mapping[str, fx.Node],
) -> QuantizationRow:
    notes: list[str] = []
    ranges: list[str] = []
    before = after = 0
    sqnr = None
    for operand in placement.operands:
        if operand.is_weight:
            path = str(nodes[operand.producer].target)
            weight = find_attribute(gm, path).detach()
            stored = prepared.choices.stored(path, weight, operand.axis, operand.spec)
            before += weight.nbytes
            after += stored.nbytes
            sqnr = signal_to_noise(weight, stored.restored())
        elif not operand.spec.is_dynamic:
            key = prepared.places.key_of(nodes[operand.producer])
            seen = prepared.observers[key].value_range()
            scale = float(parameters_of(seen.low, seen.high, operand.spec).scale)
            ranges.append(f"[{float(seen.low):.3g}, {float(seen.high):.3g}] / {scale:.3g}")
            notes += [f"%{operand.producer}: {note}" for note in seen.notes]
            notes += _shared(prepared, key, nodes)
        else:
            ranges.append("scales in each call")
    return QuantizationRow(
        **{field.name: getattr(placement, field.name) for field in fields(placement)},
        weight_sqnr=sqnr,
        activation=", ".join(ranges),
        bytes_before=before,
        bytes_after=after,
        notes=tuple(notes),
    )


def _shared(prepared: PreparedProgram, name: str, nodes: Mapping[str, fx.Node]) -> tuple[str, ...]:
    """Say which activations have one scale with another one, and where that stops."""
    mine = prepared.observers[name]
    others = [o for o, one in prepared.observers.items() if one is mine and o != name]
    if not others:
        return ()
    ends = {
        f"%{maker.name}": None
        for one in (name, *others)
        if (plain := one.partition("@")[0]) in nodes
        for maker in makers(nodes[plain])
    }
    names = ", ".join(f"%{other}" for other in others)
    return (f"%{name} shares its scale with {names}, up to {', '.join(ends)}, which compute",)
