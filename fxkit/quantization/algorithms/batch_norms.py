"""Take statistics of batch norms anew, from what quantised layers give them.

Source: "Overcoming Oscillations in Quantization-Aware Training", Nagel et al., 2022, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxkit.analysis.objects import GraphNode
from fxkit.errors import UnsupportedError
from fxkit.ir.attributes import Attribute, find_attribute
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.observe_values import ObserveValues
from fxkit.passes.probes import ProbeSite
from fxkit.quantization.algorithms.input_moments import run_all
from fxkit.quantization.batches import Batch, inputs_to_capture
from fxkit.quantization.preparation import Program, apply, graph_module_of, graph_of

Statistics = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class NormalizeByBatches(Pass):
    """Let batch norms outside of training normalise by the batch, and forget their statistics.

    Rewrites:
        %y = aten.batch_norm(%x, self.m, self.v, self.g, self.b)
        →  %y = aten.batch_norm(%x, None, None, self.g, self.b, training=True)
    """

    numerics: ClassVar[str] = "changed"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rewrite each batch norm. Cost: linear."""
        for node, call in batch_norms(edit.gm):
            _replace(edit, node, call, None)


@dataclass(frozen=True)
class SetStatistics(Pass):
    """Give batch norms other running means and variances.

    Rewrites:
        %y = aten.batch_norm(%x, self.m, self.v)  →  %y = aten.batch_norm(%x, self.m2, self.v2)

    Attributes:
        statistics: Mean and variance, float64[channels] each, by the names of batch norms.
    """

    statistics: Mapping[str, Statistics] = field(default_factory=dict)

    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "changed"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rewrite each batch norm that has new statistics. Cost: linear."""
        for node, call in batch_norms(edit.gm):
            if node.name in self.statistics:
                _replace(edit, node, call, self.statistics[node.name])


def batch_norms(gm: fx.GraphModule) -> list[tuple[fx.Node, Call]]:
    """Return the batch norms of a graph that use running statistics, in order."""
    found = []
    for node in gm.graph.nodes:
        call = resolve(node)
        if call is None or call.name != "aten.batch_norm" or call.arguments["training"]:
            continue
        if isinstance(call.arguments["input"], fx.Node):
            found.append((node, call))
    return found


def reestimate_batch_norms(quantized: Any, batches: Iterable[Batch]) -> Program:
    """Return a quantised program whose batch norms know what their layers give them now.

    Rounding changes the mean and spread of what a layer gives, with few bits by much. Each batch is
    run once with batch norms that normalise by it, and statistics are averaged over the batches.
    Only batch norms that were not folded can do so: leave `FoldBatchNorm` out before.

    Args:
        quantized: What `convert` or `quantize` returned; it stays as it is.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs; of many
            examples each.

    Raises:
        UnsupportedError: When there are no batches, or no batch norms that use statistics.
    """
    batches = list(batches)
    inputs = inputs_to_capture(batches)
    program = graph_of(quantized, *inputs)
    found = batch_norms(graph_module_of(program))
    if not found:
        raise UnsupportedError(
            "expected batch norms with running statistics, got none",
            hint="folded ones have none: quantise the program before they are folded",
        )
    sums: dict[str, Statistics] = {}
    counts: dict[str, int] = {}
    readers: dict[str, list[str]] = {}
    for node, call in found:
        readers.setdefault(call.arguments["input"].name, []).append(node.name)

    def is_read(node: GraphNode) -> bool:
        return node.name in readers

    def watch(value: object, place: ProbeSite) -> None:
        if not isinstance(value, Tensor) or value.numel() <= value.shape[1]:
            return
        rows = value.detach().double().movedim(1, 0).flatten(1)
        if not bool(rows.isfinite().all()):
            return
        for name in readers[place.name]:
            mean, variance = sums.get(name, (0.0, 0.0))
            sums[name] = mean + rows.mean(1), variance + rows.var(1)
            counts[name] = counts.get(name, 0) + 1

    apply(apply(program, NormalizeByBatches()), ObserveValues(where=is_read, callback=watch))
    run_all(program, batches)
    means = {name: (m / counts[name], v / counts[name]) for name, (m, v) in sums.items()}
    return apply(graph_of(quantized, *inputs), SetStatistics(means))


def _replace(edit: EditSession, node: fx.Node, call: Call, new: Statistics | None) -> None:
    """Replace a batch norm by one with other statistics, or with those of the batch."""
    values = dict(call.arguments)
    old = [values[name] for name in ("running_mean", "running_var")]
    with edit.on_behalf_of([node], edit.by):
        for name in ("weight", "bias"):
            if isinstance(values[name], Attribute):
                values[name] = edit.get_attr(values[name].path, before=node)
        for index, name in enumerate(("running_mean", "running_var")):
            values[name] = None
            if new is not None:
                kept = _value(edit.gm, old[index])
                statistic = new[index] if kept is None else new[index].to(kept)
                values[name] = edit.add_attribute(f"{node.name}_{name}", statistic, before=node)
        names = ("running_mean", "running_var", "weight", "bias", "momentum", "eps")
        options = {name: values[name] for name in names}
        made = edit.call(
            F.batch_norm, values["input"], training=new is None, **options, before=node
        )
        edit.replace(node, made)
    for operand in old:
        if isinstance(operand, fx.Node) and not operand.users:
            edit.erase(operand)


def _value(gm: fx.GraphModule, operand: Any) -> torch.Tensor | None:
    if isinstance(operand, Attribute):
        return find_attribute(gm, operand.path)
    is_read = isinstance(operand, fx.Node) and operand.op == "get_attr"
    return find_attribute(gm, str(operand.target)) if is_read else None
