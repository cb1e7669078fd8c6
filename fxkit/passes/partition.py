"""Hand the parts of a graph that a backend can run to that backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxkit.analysis.effect_edges import effect_predecessors
from fxkit.analysis.effects import AliasSets, effects_of
from fxkit.errors import UnsupportedError
from fxkit.ir.node_kinds import body_of
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.partitioning.backend_call import Backend, BackendCall
from fxkit.passes.partitioning.data_reads import reads_data
from fxkit.passes.partitioning.parts import GraphPart, outline_parts
from fxkit.passes.partitioning.stages import connected_pieces, two_kinds_of_stages


@dataclass(frozen=True)
class PartitionPlan:
    """What goes to a backend, and what stays.

    Attributes:
        regions: The regions, in the order in which they run.
        refused: Node that stays → why.
        effects: The order that effects ask for, as `effect_predecessors` returns it.
    """

    regions: tuple[GraphPart, ...]
    refused: Mapping[fx.Node, str]
    effects: Mapping[fx.Node, Sequence[fx.Node]]


@dataclass(frozen=True)
class Partition(Pass):
    """Replace the regions that a backend supports by calls of what the backend makes of them.

    The regions are convex and as few as there can be: two of them are never joined by nothing but
    nodes that could go into either. Nodes with effects, and nodes whose memory anybody writes to,
    stay where they are, and regions are moved around them only as far as effects allow. What the
    backend refuses, with `UnsupportedError`, stays as it was. A call whose inputs are of other
    types than those that the backend was shown runs the region itself, and so does one that needs
    a gradient from a backend that has none. Nodes keep their numbers; gradients may be summed in
    another order.

    Rewrites:
        %a = aten.relu(%x); %b = aten.neg(%a); return aten.sort(%b)
            →  %r = opaque.BackendCall(%x); return aten.sort(%r)

    Attributes:
        backend: The backend; without one, whatever has no effect is put into regions that run as
            they are.
        min_nodes: Fewest nodes that make a region worth a call.
        min_benefit: Smallest benefit of a region; asked only with `benefit`.
        benefit: What a region is worth to the backend, from its nodes.
        is_connected: Whether nodes that share no value may not be in one region.
    """

    backend: Backend | None = None
    min_nodes: int = 2
    min_benefit: float = 0.0
    benefit: Callable[[Sequence[fx.Node]], float] | None = None
    is_connected: bool = False

    preserves: ClassVar[tuple[str, ...]] = ("shapes_known",)
    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Plan the regions, show each to the backend, outline what it takes. Cost: linear."""
        plan = plan_regions(edit.graph, self)
        context.notes.extend(_summary(plan.refused))
        accepted = []
        for region in plan.regions:
            compiled = self._compile(edit.gm, region, context)
            if compiled is not None:
                accepted.append((region, compiled))
        outline_parts(edit, accepted, plan.effects, lambda index: f"{self._label}_{index}")

    @property
    def _label(self) -> str:
        return getattr(self.backend, "name", "region")

    def _compile(
        self, gm: fx.GraphModule, region: GraphPart, context: PassContext
    ) -> fx.GraphModule | BackendCall | None:
        module = region.module(gm)
        if self.backend is None:
            return module
        types = tuple(type_of(node) for node in region.inputs)
        try:
            return BackendCall(module, self.backend, types)
        except UnsupportedError as error:
            nodes = f"%{region.nodes[0].name} to %{region.nodes[-1].name}"
            context.notes.append(
                f"{len(region.nodes)} nodes, {nodes}, stay: {self._label} refused: {error.message}"
            )
            return None


def plan_regions(graph: fx.Graph, options: Partition | None = None) -> PartitionPlan:
    """Find the regions that `Partition` would show to its backend; change nothing.

    Args:
        graph: The graph.
        options: The pass, for its backend and limits.

    Returns:
        The regions, the nodes that stay with the reason, and the order that effects ask for.
        Cost: linear in the edges of the graph.
    """
    options = options or Partition()
    aliases = AliasSets(graph)
    effects = effect_predecessors(graph, aliases)
    body = body_of(graph)
    refused: dict[fx.Node, str] = {}
    for node in body:
        whole = _taken_apart(node)
        if whole in refused:
            reason = f"takes a part of %{whole.name}, which stays"
        else:
            reason = _reason_to_stay(node, aliases, options.backend)
        if reason is not None:
            refused[node] = reason
    regions = []
    for nodes in two_kinds_of_stages(body, effects, is_inside=lambda n: n not in refused):
        for piece in connected_pieces(nodes, effects) if options.is_connected else [nodes]:
            reason = _too_small(piece, options)
            if reason is None:
                regions.append(GraphPart.of(piece))
            else:
                refused.update(dict.fromkeys(piece, reason))
    return PartitionPlan(tuple(regions), refused, effects)


def _taken_apart(node: fx.Node) -> fx.Node | None:
    """Return the node of which a node takes one of several results: the two stay together."""
    call = resolve(node)
    if call is None or call.name != "python.getitem":
        return None
    (whole, *_) = node.all_input_nodes
    producer = resolve(whole)
    if isinstance(type_of(whole), (tuple, list)):
        return whole
    if producer is None or producer.operator.schema is None:
        return None
    returns = producer.operator.schema.returns
    return whole if len(returns) != 1 or str(returns[0].type) != "Tensor" else None


def _reason_to_stay(node: fx.Node, aliases: AliasSets, backend: Backend | None) -> str | None:
    effects = effects_of(node)
    if not effects.is_pure:
        return effects.describe()
    if aliases.is_written(node):
        return f"%{aliases.writers(node)[0].name} writes to its memory"
    if reads_data(node):
        return "reads numbers out of a tensor"
    return None if backend is None else backend.supports(node)


def _too_small(nodes: Sequence[fx.Node], options: Partition) -> str | None:
    if len(nodes) < options.min_nodes:
        return f"in a region of {len(nodes)}, and min_nodes is {options.min_nodes}"
    if options.benefit is None:
        return None
    benefit = options.benefit(nodes)
    if benefit < options.min_benefit:
        return (
            f"in a region with a benefit of {benefit:g}, and min_benefit is {options.min_benefit:g}"
        )
    return None


def _summary(refused: Mapping[fx.Node, str]) -> list[str]:
    """Return one line for each operator and reason, with the first node it holds for."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], fx.Node] = {}
    for node, reason in refused.items():
        call = resolve(node)
        key = (call.name if call is not None else node.op, reason)
        counts[key] += 1
        first.setdefault(key, node)
    return [
        f"{count} × {name} stays, first %{first[name, reason].name}: {reason}"
        for (name, reason), count in counts.items()
    ]
