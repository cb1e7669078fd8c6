"""Compute activations again in backward instead of keeping them, within a budget of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from fxkit.analysis.cost import cost_of
from fxkit.analysis.effects import AliasSets, effects_of
from fxkit.errors import PassError
from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.options import check_at_least
from fxkit.passes.partitioning.data_reads import reads_data
from fxkit.passes.partitioning.parts import GraphPart, outline_parts
from fxkit.passes.partitioning.saved_tensors import SavedMemory, saved_memories
from fxkit.torch_adapters.fx_nodes import order_key


@dataclass(frozen=True)
class ActivationCheckpointing(Pass):
    """Put runs of nodes into submodules that `torch.utils.checkpoint` runs again in backward.

    Numbers, gradients and random numbers stay the very same. Of the ways to cut the graph that it
    tries, it takes the one that computes least again and keeps within the budget; if none does,
    the one that keeps least, with a note. What writes to memory, touches memory that is written to
    later, or may do anything, is not run twice and stays outside.

    Rewrites:
        %a = aten.linear(%x, ...); %b = aten.gelu(%a); return aten.mul(%b, %b)
            →  %b = opaque.CheckpointedPart(%x); return aten.mul(%b, %b)

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.

    Attributes:
        budget: Bytes of activations that may be alive when backward begins, the largest part that
            is computed again included. Left out: half of what is kept without this pass.
        min_nodes: Fewest nodes of a part.
    """

    budget: int | None = None
    min_nodes: int = 2

    requires: ClassVar[tuple[str, ...]] = ("shapes_known",)
    is_idempotent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_at_least(self, "budget", 0)
        check_at_least(self, "min_nodes", 1)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Find what is kept, choose the parts, outline them. Cost: linear times the logarithm.

        Raises:
            PassError: Without example inputs.
        """
        if context.args is None:
            raise PassError(
                "expected example inputs to find what autograd keeps, got none",
                hint="pass args=(...) to PassManager",
            )
        memories = saved_memories(edit.gm, context.args, context.kwargs)
        kept = sum(m.nbytes for m in memories if m.savers)
        budget = kept // 2 if self.budget is None else self.budget
        if kept <= budget:
            context.notes.append(f"{kept:,} bytes are kept, which is within {budget:,}")
            return
        plan = _choose(edit.graph, memories, budget, self.min_nodes)
        parts = [_checkpointed(edit.gm, nodes) for nodes in plan.segments]
        outline_parts(edit, parts, {}, lambda index: f"checkpointed_{index}")
        context.notes.append(_told(plan, kept, budget))


def _checkpointed(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> tuple[GraphPart, nn.Module]:
    part = GraphPart.of(nodes)
    is_random = any(effects_of(node).is_random for node in nodes)
    return part, CheckpointedPart(part.module(gm), is_random)


def _told(plan: _Plan, kept: int, budget: int) -> str:
    met = "within" if plan.nbytes <= budget else "the least found, and more than"
    return (
        f"{kept:,} bytes kept become {plan.nbytes:,}, {met} the budget of {budget:,}; "
        f"{len(plan.segments)} parts compute {plan.flops:,} operations again"
    )


class CheckpointedPart(nn.Module):
    """Runs a part, and runs it again in backward."""

    def __init__(self, part: fx.GraphModule, is_random: bool) -> None:
        super().__init__()
        self.part = part
        self.is_random = is_random
        self.training = part.training

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.part(*args)
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.part, *args, use_reentrant=False, preserve_rng_state=self.is_random)


@dataclass(frozen=True)
class _Plan:
    """Segments to compute again, the bytes that are then kept at most, and the operations."""

    segments: tuple[tuple[fx.Node, ...], ...]
    nbytes: int
    flops: int

    def is_better(self, other: _Plan | None, budget: int) -> bool:
        if other is None:
            return True
        if min(self.nbytes, other.nbytes) > budget:
            return self.nbytes < other.nbytes
        if max(self.nbytes, other.nbytes) > budget:
            return self.nbytes <= budget
        return self.flops < other.flops


def _choose(graph: fx.Graph, memories: Sequence[SavedMemory], budget: int, min_nodes: int) -> _Plan:
    """Cut the graph more and more finely, and keep the best plan."""
    runs = _runs(graph)
    produced: dict[fx.Node, int] = {}
    for memory in memories:
        produced[memory.producer] = produced.get(memory.producer, 0) + memory.nbytes
    crossing = _crossing(graph, memories)
    flops = {node: cost_of(node).flops or 0 for run in runs for node in run}
    best, size = _Plan((), _kept(memories, ()), 0), sum(produced.values())
    for _ in range(max(len(flops), 1).bit_length() + 1):
        segments = [s for run in runs for s in _cut(run, size, produced, crossing)]
        segments = [s for s in segments if len(s) >= min_nodes]
        plan = _fewest(segments, memories, flops, budget)
        best = plan if plan.is_better(best, budget) else best
        size //= 2
    return best


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the longest runs of neighbours that can be run twice."""
    aliases = AliasSets(graph)
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op in COMPUTES_NOTHING:
            continue
        effects = effects_of(node)
        has_effect = effects.writes or effects.is_opaque or effects.is_global or effects.may_raise
        has_effect = has_effect or reads_data(node)
        touched = (node, *node.all_input_nodes)
        if has_effect or any(node < writer for n in touched for writer in aliases.writers(n)[-1:]):
            runs.append([])
        else:
            runs[-1].append(node)
    return [run for run in runs if run]


def _crossing(graph: fx.Graph, memories: Iterable[SavedMemory]) -> dict[fx.Node, int]:
    """Return the bytes that are made up to each node and used after it."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    change = [0] * (len(place) + 1)
    for memory in memories:
        users = [place[u] for holder in memory.holders for u in holder.users]
        if users:
            change[place[memory.producer]] += memory.nbytes
            change[max(users)] -= memory.nbytes
    crossing, alive = {}, 0
    for node, index in place.items():
        alive += change[index]
        crossing[node] = alive
    return crossing


def _cut(
    run: Sequence[fx.Node], size: int, produced: dict[fx.Node, int], crossing: dict[fx.Node, int]
) -> list[tuple[fx.Node, ...]]:
    """Cut a run into segments of about `size` bytes, where few bytes cross."""
    segments, start, alive, best = [], 0, 0, None
    for index, node in enumerate(run):
        alive += produced.get(node, 0)
        if 2 * alive >= size and (best is None or crossing[node] <= crossing[run[best]]):
            best = index
        if alive >= size and best is not None:
            segments.append(tuple(run[start : best + 1]))
            start = best + 1
            alive, best = sum(produced.get(n, 0) for n in run[start : index + 1]), None
    segments.append(tuple(run[start:]))
    return [segment for segment in segments if segment]


def _fewest(
    segments: list[tuple[fx.Node, ...]],
    memories: Sequence[SavedMemory],
    flops: dict[fx.Node, int],
    budget: int,
) -> _Plan:
    """Leave out as many of the dearest segments as the budget bears."""
    work = {segment: sum(flops[n] for n in segment) for segment in segments}
    freed = dict.fromkeys(segments, 0)
    home = {node: segment for segment in segments for node in segment}
    for memory in memories:
        segment = home.get(memory.producer)
        if segment is not None and memory.savers:
            freed[segment] += memory.nbytes
    ordered = sorted(segments, key=lambda s: freed[s] / (work[s] + 1))
    fewest, most = 0, len(ordered)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if _kept(memories, ordered[middle:]) <= budget:
            fewest = middle
        else:
            most = middle - 1
    chosen = sorted(ordered[fewest:], key=lambda s: order_key(s[0]))
    return _Plan(tuple(chosen), _kept(memories, chosen), sum(work[s] for s in chosen))


def _kept(memories: Sequence[SavedMemory], segments: Sequence[tuple[fx.Node, ...]]) -> int:
    """Return the bytes alive when backward begins, and those of the largest part run again."""
    home = {node: index for index, segment in enumerate(segments) for node in segment}
    total, again = 0, [0] * len(segments)
    for memory in memories:
        inside = home.get(memory.producer, -1)
        if inside >= 0 and any(home.get(saver) == inside for saver in memory.savers):
            again[inside] += memory.nbytes
        is_saved = any(home.get(saver, -1) == -1 for saver in memory.savers)
        users = (user for holder in memory.holders for user in holder.users)
        is_input = any(home.get(user, -1) not in (-1, inside) for user in users)
        if is_saved or is_input:
            total += memory.nbytes
    return total + max(again, default=0)
