"""Which nodes share a kernel.

The graph is put into a new order, in time linear in its edges: everything that can't be fused runs
as soon as it is ready; then a region opens at the first fusable node that is left and takes in
every ready node that fits, until none does. A node that would stay alone, since its readers wait
for others, is put off until no other is left. The members of a region stand next to each other in
that order, so no path leaves a region and returns to it. Effects are edges like any other: nothing
changes places with a write, a random draw or an unknown call that it must not pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxkit.analysis.effects import AliasSets
from fxkit.lower.fusion.candidates import Candidate, candidate, is_candidate, likeness
from fxkit.lower.fusion.column_sums import sums_well
from fxkit.lower.fusion.emit import Emitted, Operand, emit
from fxkit.lower.fusion.graph_order import order_edges
from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.fusion.kernel_faults import KernelFaults
from fxkit.lower.fusion.overwriting import hidden_overwrites
from fxkit.lower.fusion.placement import first_space, rows_lie_along_memory
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.fusion.region_space import RegionSpace
from fxkit.lower.fusion.view_map import is_alias, shown_by, views_of
from fxkit.lower.loop_ir.loop_ir import Instruction, Kernel, Unfusable
from fxkit.lower.operators.reduction_ops import ReductionOp
from fxkit.lower.scheduling.index_intervals import (
    IndexInterval,
    computed,
    outcome,
    stretches,
    whole_row,
)
from fxkit.lower.scheduling.kernel_cost import cost_of

# Cost of a region's kernel, at most, as a multiple of what its operators cost in kernels of their
# own: it is larger where fused values are computed again at several indices.
MAX_REPETITION = 1.5

# Guarded loads of one point, at most: each is a masked load at every point of the kernel.
MAX_GUARDED = 4

# Gathers of one point, at most: their loads are scalar, not vectors.
MAX_GATHERED = 4


@dataclass(frozen=True)
class FusionPlan:
    """The graph in its new order.

    Attributes:
        steps: Single nodes that eager runs, and groups that become one kernel each.
        reasons: Candidates that eager runs, each with its reason.
        emitted: Position of a group among the steps → its kernel.
    """

    steps: list[fx.Node | FusionGroup]
    reasons: dict[fx.Node, str]
    emitted: dict[int, Emitted]

    def __str__(self) -> str:
        lines = [
            f"{step.name} by itself"
            if isinstance(step, fx.Node)
            else f"region of {', '.join(member.node.name for member in step.members)}"
            for step in self.steps
            if isinstance(step, FusionGroup) or step.op.startswith("call")
        ]
        return "\n".join([*lines, *(f"{n.name}: {why}" for n, why in self.reasons.items())])


JoinsKernel = Callable[[FusionGroup, torch.nn.Module], bool]


def _joins_nothing(group: FusionGroup, root: torch.nn.Module) -> bool:
    return False


def partition(
    gm: fx.GraphModule,
    policy: Policy | None = None,
    joins_kernel: JoinsKernel = _joins_nothing,
    faults: KernelFaults | None = None,
) -> FusionPlan:
    """Divide a graph into kernels and nodes that eager runs.

    Args:
        gm: The module; every node has its type.
        policy: When a kernel pays.
        joins_kernel: Tells whether a region joins the kernel of an operand, such as a product;
            then it pays, whatever the policy says of the region alone.
        faults: Takes note of nodes whose operator's row raises, which eager runs.
    """
    return _Partitioner(gm, policy or Policy(), joins_kernel, faults or KernelFaults()).run()


class _Partitioner:
    def __init__(
        self,
        gm: fx.GraphModule,
        policy: Policy,
        joins_kernel: JoinsKernel,
        faults: KernelFaults,
    ) -> None:
        self._gm = gm
        self._policy = policy
        self._joins_kernel = joins_kernel
        self._faults = faults
        self._order = {node: position for position, node in enumerate(gm.graph.nodes)}
        aliases = AliasSets(gm.graph)
        self._next = order_edges(gm.graph, aliases)
        self._overwrites = hidden_overwrites(gm.graph, aliases)
        self._waits_for = dict.fromkeys(self._order, 0)
        for targets in self._next.values():
            for target in targets:
                self._waits_for[target] += 1
        self._ready = _NodeQueue(self._order)
        self._fusable = _NodeQueue(self._order)
        self._candidates: dict[fx.Node, Candidate] = {}
        self._steps: list[fx.Node | FusionGroup] = []
        self._reasons: dict[fx.Node, str] = {}
        self._emitted: dict[int, Emitted] = {}
        self._alone: dict[fx.Node, tuple[RegionSpace, Emitted]] = {}
        self._costs: dict[fx.Node, int] = {}
        self._like: dict[Hashable, tuple[Emitted, tuple[Operand, ...], int]] = {}
        self._postponed: set[fx.Node] = set()

    def run(self) -> FusionPlan:
        for node, count in self._waits_for.items():
            if count == 0:
                self._offer(node)
        while self._ready or self._fusable:
            while self._ready:
                self._run_in_eager(self._ready.pop())
            if self._fusable:
                self._open(self._fusable.pop())
        return FusionPlan(self._steps, self._reasons, self._emitted)

    def _offer(self, node: fx.Node) -> None:
        """Queue a node all of whose operands are there."""
        if not is_candidate(node):
            self._ready.push(node)
            return
        try:
            self._candidates[node] = self._tried(node)
        except Unfusable as reason:
            self._reasons[node] = reason.message
        except Exception as error:
            self._reasons[node] = self._faults.note((node,), error)
        else:
            self._fusable.push(node)
            return
        self._ready.push(node)

    def _tried(self, node: fx.Node) -> Candidate:
        """Return a node as a candidate that is known to have a kernel of its own."""
        found = candidate(node, self._gm, node in self._overwrites)
        found.check_device(self._policy.device)
        if self._is_slow(found):
            raise Unfusable("eager's kernel is faster, whatever is taken in with it")
        alone = self._group(found)
        alone.take(found)
        outputs = tuple([(node, position) for position in range(len(found.types))])
        tensors = tuple(dict.fromkeys(found.tensors))
        key = likeness(found, tensors)
        if key in self._like:
            first, taken, cost = self._like[key]
            operands = dict(zip(taken, tensors, strict=True))
            emitted = Emitted(first.kernel, tuple(map(operands.__getitem__, first.inputs)), outputs)
        else:
            emitted = emit(alone, outputs)
            self._check_alone(emitted.kernel)
            cost = cost_of(emitted.kernel)
            self._like[key] = emitted, tensors, cost
        self._costs[node] = cost
        self._alone[node] = alone.space, emitted
        return found

    def _check_alone(self, kernel: Kernel) -> None:
        """Raise where eager is faster, or the target's printer can't print a kernel."""
        if self._is_scattered(kernel, (whole_row(kernel),)):
            raise Unfusable("it reads from one of many places, which eager does in parts, faster")
        refusal = self._policy.refusal(kernel)
        if refusal is not None:
            raise Unfusable(refusal)

    def _group(self, first: Candidate, *, is_strict: bool = False) -> FusionGroup:
        """Return a region that has yet to take in its first member."""
        space = first_space(first)
        may_sum = not is_strict and self._policy.sums_over_rows
        return FusionGroup(space, is_strict=is_strict, may_sum=may_sum, rounds=self._policy.rounds)

    def _is_slow(self, found: Candidate) -> bool:
        entry = found.entry
        is_slow = isinstance(entry, ReductionOp) and (
            entry.slow or (entry.slow_along and rows_lie_along_memory(found, are_few=True))
        )
        return is_slow and self._policy.device.type == "cpu" and self._policy.min_members > 1

    def _is_scattered(self, kernel: Kernel, parts: tuple[IndexInterval, ...]) -> bool:
        """Tell whether a kernel has so many guarded loads or gathers that eager is faster.

        Args:
            kernel: The kernel.
            parts: Intervals of its row; a guard whose outcome is constant along one of them costs
                nothing there.
        """
        if self._policy.min_members <= 1 or not kernel.sizes:
            return False
        wide = kernel.row_wide if kernel.row_rank else replace(kernel, row_rank=1).row_wide
        loads = [i for i in kernel.body if i.op == "load"]
        gathered = sum(any(wide[o] for o in i.indices) for i in loads)
        if gathered > MAX_GATHERED or any(_asked(kernel, s) > MAX_GUARDED for s in parts):
            return True
        guarded = [i for i in loads if i.guard is not None]
        return any(map(_is_repeated, guarded)) and len(stretches(kernel)) == 1

    def _run_in_eager(self, node: fx.Node) -> None:
        self._steps.append(node)
        self._release(node)

    def _release(self, node: fx.Node) -> list[fx.Node]:
        """Queue what waited for a node, and return it."""
        freed = []
        for target in self._next[node]:
            self._waits_for[target] -= 1
            if self._waits_for[target] == 0:
                self._offer(target)
                freed.append(target)
        return freed

    def _open(self, first: fx.Node) -> None:
        """Make a region of a node and what joins it, unless a later one may take the node in."""
        if self._fusable and first not in self._postponed and self._may_be_joined(first):
            self._postponed.add(first)
            self._fusable.push_last(first)
            return
        self._close(self._grow(first))

    def _may_be_joined(self, node: fx.Node) -> bool:
        """Tell whether all readers of a node wait for something else, so that it would be alone."""
        if isinstance(self._candidates[node].entry, ReductionOp) or any(self._siblings(node)):
            return False
        readers = [user for user in node.users if user.op != "output"]
        return bool(readers) and all(is_candidate(r) and self._waits_for[r] > 1 for r in readers)

    def _grow(self, first: fx.Node) -> FusionGroup:
        """Open a region and take in whatever is ready, related and fits, in graph order."""
        group = self._group(self._candidates[first])
        waiting = _NodeQueue(self._order, [first])
        self._fusable.push(first)
        while waiting:
            node = waiting.pop()
            if self._joins(node, group):
                for near in (*self._release(node), *self._siblings(node)):
                    waiting.push(near)
        return group

    def _siblings(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the fusable nodes that share an operand or a reader with a node."""
        for operand in node.all_input_nodes:
            for shown in views_of(shown_by(operand)):
                yield from (user for user in shown.users if user in self._fusable)
        for user in node.users:
            if user.op != "output":
                yield from (other for other in user.all_input_nodes if other in self._fusable)

    def _joins(self, node: fx.Node, group: FusionGroup) -> bool:
        if node in self._candidates:
            if node not in self._fusable or not group.try_add(self._candidates[node]):
                return False
            self._fusable.remove(node)
            return True
        if is_alias(node) and node in self._ready and group.try_add_view(node):
            self._ready.remove(node)
            return True
        return False

    def _close(self, group: FusionGroup) -> None:
        emitted = self._emission(group)
        if self._is_one_kernel(group, emitted):
            self._settle(group, emitted)
            return
        for part in self._in_one_space_each(group):
            if isinstance(part, FusionGroup):
                self._settle(part, self._emission(part))
            else:
                self._steps.append(part)

    def _emission(self, group: FusionGroup) -> Emitted | Unfusable | None:
        """Return a region's kernel, or why it has none; None where nobody reads its results."""
        outputs = group.outputs()
        if not outputs:
            return None
        if len(group.members) == 1 and not group.aliases:
            space, emitted = self._alone[group.members[0].node]
            if space == group.space and emitted.outputs == tuple(outputs):
                return emitted
        try:
            return emit(group, outputs)
        except Unfusable as reason:
            return reason
        except Exception as error:
            members = [member.node for member in group.members]
            return Unfusable(self._faults.note(members, error))

    def _settle(self, group: FusionGroup, emitted: Emitted | Unfusable | None) -> None:
        """Make a region one step, or each of its nodes where a kernel does not pay."""
        objection = self._policy.objection(group)
        if objection is not None and self._joins_kernel(group, self._gm):
            objection = None
        if objection is None and isinstance(emitted, Emitted):
            self._emitted[len(self._steps)] = emitted
            self._steps.append(group)
            return
        if objection is None and isinstance(emitted, Unfusable):
            objection = emitted.message
        if objection is not None:
            self._reasons.update((member.node, objection) for member in group.members)
        nodes = [*(m.node for m in group.members), *group.aliases]
        self._steps.extend(sorted(nodes, key=self._order.__getitem__))

    def _is_one_kernel(self, group: FusionGroup, emitted: Emitted | Unfusable | None) -> bool:
        """Tell whether one kernel computes a region, and not much of it several times."""
        kernel = emitted.kernel if isinstance(emitted, Emitted) else None
        # Sums over all rows may join the loops over each row only where those run along memory.
        if group.sums and (kernel is None or not sums_well(kernel)):
            return False
        if group.is_simple:
            return True
        if kernel is None or self._is_scattered(kernel, stretches(kernel)):
            return False
        return cost_of(kernel) <= MAX_REPETITION * sum(self._costs[m.node] for m in group.members)

    def _in_one_space_each(self, group: FusionGroup) -> Iterator[fx.Node | FusionGroup]:
        """Divide a region into ones that compute each value once, and views left to eager."""
        part: FusionGroup | None = None
        for node in group.nodes:
            found = self._candidates.get(node)
            if found is None:
                if part is not None and part.try_add_view(node):
                    continue
                if part is not None:
                    yield part
                part = None
                yield node
                continue
            if part is not None and part.try_add(found):
                continue
            if part is not None:
                yield part
            part = self._group(found, is_strict=True)
            part.take(found)
        if part is not None:
            yield part


class _NodeQueue:
    """A queue of nodes in graph order, from which any node can be taken."""

    def __init__(self, order: dict[fx.Node, int], nodes: list[fx.Node] | None = None) -> None:
        self._order = order
        self._heap: list[tuple[int, fx.Node]] = []
        self._held: set[fx.Node] = set()
        for node in nodes or ():
            self.push(node)

    def push(self, node: fx.Node) -> None:
        if node not in self._held:
            self._held.add(node)
            heapq.heappush(self._heap, (self._order[node], node))

    def push_last(self, node: fx.Node) -> None:
        """Take in a node that is popped when no other is left."""
        self._held.add(node)
        heapq.heappush(self._heap, (len(self._order) + self._order[node], node))

    def pop(self) -> fx.Node:
        self._drop_taken()
        node = heapq.heappop(self._heap)[1]
        self._held.remove(node)
        return node

    def remove(self, node: fx.Node) -> None:
        self._held.remove(node)

    def _drop_taken(self) -> None:
        while self._heap and self._heap[0][1] not in self._held:
            heapq.heappop(self._heap)

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._held

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._held)

    def __bool__(self) -> bool:
        return bool(self._held)


def _asked(kernel: Kernel, stretch: IndexInterval) -> int:
    """Count the guarded loads whose guard is not constant along an interval."""
    loads = [i for i in map(kernel.body.__getitem__, computed(kernel, stretch)) if i.op == "load"]
    guards = [i.guard for i in loads if i.guard is not None]
    return sum(outcome(kernel, stretch, guard) is None for guard in guards)


def _is_repeated(load: Instruction) -> bool:
    """Tell whether a load has the same element all along the innermost axis."""
    return not load.indices and not any(load.detail.strides[-1:])
