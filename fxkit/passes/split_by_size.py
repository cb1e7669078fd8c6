"""Split a graph into submodules of about equal size."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.cost import cost_of
from fxkit.errors import PassError
from fxkit.ir.attributes import Attribute, find_attribute
from fxkit.ir.node_kinds import body_of
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.partitioning.labelled_parts import split_by_labels

_MEASURES = ("parameters", "flops")

# How far a cut may lie from where it balances best, as a share of a part's size.
_SLACK = 0.1


@dataclass(frozen=True)
class SplitBySize(Pass):
    """Cut the graph, in its order, into submodules that are called one after another.

    The largest part is as small as cuts in this order allow, give or take a tenth that is used to
    cut where the fewest bytes cross. What reads numbers out of tensors stays outside. A shared
    parameter counts where it is first used, and stays shared. The order of what computes stays, and
    so do numbers, gradients and effects.

    Rewrites:
        %a = aten.linear(%x, ...); %b = aten.linear(%a, ...); return %b
            →  %part_0 = self.part_0(%x); %part_1 = self.part_1(%part_0); return %part_1

    Attributes:
        parts: How many submodules; fewer when there is less to split.
        by: What is balanced: `parameters` (bytes of parameters and buffers) or `flops`.
    """

    parts: int = 2
    by: str = "parameters"

    preserves: ClassVar[tuple[str, ...]] = ("shapes_known",)
    is_idempotent: ClassVar[bool] = False

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Weigh the nodes, choose the cuts, outline what is between. Cost: linear in the edges.

        Raises:
            PassError: For fewer than one part, or another measure.
        """
        if self.parts < 1 or self.by not in _MEASURES:
            raise PassError(
                f"expected at least one part by {' or '.join(_MEASURES)}, got {self.parts} by "
                f"{self.by!r}",
                hint="SplitBySize(parts=4, by='flops')",
            )
        nodes = body_of(edit.graph)
        weights = _parameter_bytes(edit.gm, nodes) if self.by == "parameters" else _flops(nodes)
        if not any(weights):
            weights = [1] * len(nodes)
            context.notes.append(f"there are no {self.by}: parts are balanced by their nodes")
        cuts = _cuts(weights, _crossing(nodes), self.parts)
        bounds = [0, *cuts, len(nodes)]
        slices = [nodes[a:b] for a, b in itertools.pairwise(bounds) if a < b]
        split_by_labels(edit, context, {n: i for i, part in enumerate(slices) for n in part})
        sizes = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
        context.notes.append(f"{self.by} of the parts: {', '.join(f'{s:,}' for s in sizes)}")


def _parameter_bytes(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[int]:
    """Return the bytes of the parameters and buffers that each node is the first to use."""
    seen: set[int] = set()
    weights = []
    for node in nodes:
        paths = [str(o.target) for o in node.all_input_nodes if o.op == "get_attr"]
        call = resolve(node)
        paths += (
            [a.path for a in call.arguments.values() if isinstance(a, Attribute)] if call else []
        )
        held: list[Any] = [find_attribute(gm, path) for path in paths]
        if call is not None and call.operator.is_opaque and node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            held += [*module.parameters(), *module.buffers()]
        fresh = {id(t): t for t in held if isinstance(t, torch.Tensor) and id(t) not in seen}
        seen.update(fresh)
        weights.append(sum(t.nbytes for t in fresh.values()))
    return weights


def _flops(nodes: Sequence[fx.Node]) -> list[int]:
    return [cost_of(node).flops or 0 for node in nodes]


def _crossing(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the bytes that are needed behind each node: of values, or their number if unknown."""
    place = {node: index for index, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for node, index in place.items():
        last = max((place.get(user, len(nodes)) for user in node.users), default=index)
        known = type_of(node)
        size = known.nbytes if isinstance(known, TensorType) else 1
        change[index] += size
        change[last] -= size
    crossing, alive = [], 0
    for index in range(len(nodes)):
        alive += change[index]
        crossing.append(alive)
    return crossing


def _cuts(weights: Sequence[int], crossing: Sequence[int], parts: int) -> list[int]:
    """Return the places to cut before: the largest part as small as can be, then few bytes."""
    parts = min(parts, len(weights))
    sums = [0, *itertools.accumulate(weights)]
    least = _least_limit(weights, parts)
    slack = _SLACK * least
    earliest = _earliest(weights, least + slack, parts)
    cuts, start = [], 0
    for rest in range(parts - 1, 0, -1):
        first = max(start + 1, earliest[rest])
        last = bisect.bisect_right(sums, sums[start] + least + slack) - 1
        places = range(first, min(last, len(weights) - rest) + 1)
        if not places:
            break
        aim = sums[start] + (sums[-1] - sums[start]) / (rest + 1)
        off = {place: abs(sums[place] - aim) for place in places}
        allowed = max(slack, min(off.values()))
        start = min(
            (p for p in places if off[p] <= allowed), key=lambda p: (crossing[p - 1], off[p])
        )
        cuts.append(start)
    return cuts


def _least_limit(weights: Sequence[int], parts: int) -> int:
    """Return the least weight that no part has to exceed."""
    low, high = max(weights, default=0), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(weights, middle) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_needed(weights: Sequence[int], limit: int) -> int:
    count, total = 1, 0
    for weight in weights:
        if total + weight > limit:
            count, total = count + 1, 0
        total += weight
    return count


def _earliest(weights: Sequence[int], limit: float, parts: int) -> list[int]:
    """Return, for each number of parts, the first place from which so many reach to the end."""
    found, total = [len(weights)], 0.0
    for index in range(len(weights) - 1, -1, -1):
        if total + weights[index] > limit:
            found.append(index + 1)
            total = 0.0
        total += weights[index]
    found += [0] * (parts + 1)
    return found
