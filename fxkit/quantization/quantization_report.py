"""What was quantised, how, and what it costs: one row an operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxkit.ir.attributes import find_attribute
from fxkit.quantization.affine import parameters_of, signal_to_noise
from fxkit.quantization.conversion import stored_weight
from fxkit.quantization.placement import QuantizedOperator, placements
from fxkit.quantization.preparation import PreparedProgram
from fxkit.torch_adapters import pytree


@dataclass(frozen=True)
class QuantizationRow:
    """One operator that can be quantised.

    Attributes:
        node: Name of its node.
        operator: Its name.
        source: The user's line, or None.
        how: The specs of its operands, or `float`.
        reason: Where the decision comes from, or why it stays in floating point.
        weight_sqnr: dB of the weight's signal over the error of its integers, or None.
        activation: The range and scale of its activations, as text.
        bytes_before: Bytes of the weight.
        bytes_after: Bytes of what is stored in its place.
        notes: What was odd about values in calibration.
    """

    node: str
    operator: str
    source: str | None
    how: str
    reason: str
    weight_sqnr: float | None
    activation: str
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...]

    @property
    def is_quantized(self) -> bool:
        """Whether any operand is quantised."""
        return self.how != "float"


@dataclass(frozen=True)
class QuantizationReport:
    """The rows of all operators that can be quantised, and the error of the results.

    Attributes:
        rows: In the order of the graph.
        sqnr: dB of each result's signal over the error, over all batches; empty without batches.
    """

    rows: tuple[QuantizationRow, ...]
    sqnr: tuple[float, ...] = ()

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
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *lines)
        ]
        return "\n".join([*text, "", self._summary()])

    def _summary(self) -> str:
        done = sum(row.is_quantized for row in self.rows)
        before = sum(row.bytes_before for row in self.rows)
        after = sum(row.bytes_after for row in self.rows)
        found = f"{done} of {len(self.rows)} operators quantised, weights {before:,} -> {after:,} B"
        results = ", ".join(f"{one:.1f} dB" for one in self.sqnr)
        return f"{found}, results at {results}" if results else found

    def __str__(self) -> str:
        return self.table()


def report(
    quantized: Any, prepared: PreparedProgram, batches: Iterable[tuple[Any, ...]] = ()
) -> QuantizationReport:
    """Tell how each operator is quantised or why not, and how far results are off.

    Args:
        quantized: What `convert` or `fxkit.compile` of it returned.
        prepared: What was converted: it computes what the float model does.
        batches: Inputs to compare results for, a tuple of positional inputs each.
    """
    decided = placements(prepared.graph_module, prepared.config)
    rows = tuple(_row(prepared, placement) for placement in decided)
    return QuantizationReport(rows, _errors(quantized, prepared, batches))


def _errors(
    quantized: Any, prepared: PreparedProgram, batches: Iterable[tuple[Any, ...]]
) -> tuple[float, ...]:
    exact: list[list[Tensor]] = []
    found: list[list[Tensor]] = []
    fresh = prepared.remake()
    with torch.no_grad():
        for batch in batches:
            exact.append(_float_tensors(fresh(*batch)))
            found.append(_float_tensors(quantized(*batch)))
    pairs = zip(zip(*exact, strict=True), zip(*found, strict=True), strict=True)
    return tuple(signal_to_noise(_flat(ours), _flat(theirs)) for ours, theirs in pairs)


def _float_tensors(result: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(result)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def _row(prepared: PreparedProgram, placement: QuantizedOperator) -> QuantizationRow:
    gm, notes, ranges = prepared.graph_module, [], []
    before = after = 0
    sqnr = None
    nodes = {node.name: node for node in gm.graph.nodes}
    for operand in placement.operands:
        if operand.is_weight:
            weight = find_attribute(gm, str(nodes[operand.producer].target)).detach()
            stored = stored_weight(weight, operand.axis, operand.spec)
            before += weight.nbytes
            after += stored.nbytes(operand.spec)
            sqnr = signal_to_noise(weight, _restored(stored, operand.axis, weight))
        elif operand.producer in prepared.observers:
            seen = prepared.observers[operand.producer].value_range()
            scale = float(parameters_of(seen.low, seen.high, operand.spec).scale)
            ranges.append(f"[{float(seen.low):.3g}, {float(seen.high):.3g}] / {scale:.3g}")
            notes += [f"%{operand.producer}: {note}" for note in seen.notes]
        else:
            ranges.append("scales in each call")
    kinds = [f"{'weight' if o.is_weight else 'input'} {o.spec}" for o in placement.operands]
    return QuantizationRow(
        placement.node,
        placement.operator,
        placement.source,
        ", ".join(kinds) or "float",
        placement.reason,
        sqnr,
        ", ".join(ranges),
        before,
        after,
        tuple(notes),
    )


def _restored(stored: Any, axis: int, weight: Tensor) -> Tensor:
    scale, zero = stored.parameters.scale, stored.parameters.zero_point
    if scale.ndim == 2:
        size = weight.shape[1] // scale.shape[1]
        scale, zero = (t.repeat_interleave(size, 1) for t in (scale, zero))
    elif scale.ndim == 1:
        shape = [-1 if other == axis else 1 for other in range(weight.ndim)]
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return (stored.integers.double() - zero) * scale.double()
