"""Which nodes must come after which when kernels put a graph into a new order.

The order that passes go by, `effect_predecessors`, is another one. Here operands, inputs and the
output have edges too. A write to an input is a barrier, since the caller may pass overlapping
tensors. What draws random numbers, what may raise and, beside that, all writes form one chain.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping

from torch import fx

from fxkit.analysis.effects import AliasSets, Effects, effects_of


def order_edges(graph: fx.Graph, aliases: AliasSets) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node, the nodes that must come after it, each once."""
    after: dict[fx.Node, dict[fx.Node, None]] = {node: {} for node in graph.nodes}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            after[operand][node] = None
    _add_inputs_and_output(after)
    _add_effects(aliases, after)
    return {node: list(targets) for node, targets in after.items()}


def _add_inputs_and_output(after: dict[fx.Node, dict[fx.Node, None]]) -> None:
    """Keep placeholders in their order, and the output last."""
    inputs = [node for node in after if node.op == "placeholder"]
    output = next((node for node in after if node.op == "output"), None)
    for before, node in itertools.pairwise(inputs):
        after[before][node] = None
    for node in after:
        if output is not None and node is not output:
            after[node][output] = None


def _add_effects(aliases: AliasSets, after: dict[fx.Node, dict[fx.Node, None]]) -> None:
    """Order what touches written memory, draws random numbers, may raise, or may do anything."""
    position = {node: index for index, node in enumerate(after)}
    inputs = [node for node in after if node.op == "placeholder"]
    barrier: fx.Node | None = None
    since_barrier: list[fx.Node] = []
    last_ordered: fx.Node | None = None
    has_checks = any(effects_of(node).may_raise for node in aliases.effectful)
    for node in after:
        if barrier is not None:
            after[barrier][node] = None
        effects = effects_of(node)
        if _is_barrier(effects, aliases, inputs):
            for earlier in since_barrier:
                after[earlier][node] = None
            barrier, since_barrier = node, []
        since_barrier.append(node)
        if effects.is_random or effects.may_raise or (has_checks and effects.writes):
            if last_ordered is not None:
                after[last_ordered][node] = None
            last_ordered = node
        if aliases.effectful:
            _add_writers(node, aliases, position, after)


def _is_barrier(effects: Effects, aliases: AliasSets, inputs: list[fx.Node]) -> bool:
    """Tell whether nothing may change places with a node that has these effects.

    That holds for a write to an input too, since the caller may pass overlapping tensors.
    """
    if effects.is_opaque or effects.is_global:
        return True
    return any(
        not isinstance(written, fx.Node) or any(aliases.may_alias(written, i) for i in inputs)
        for written in effects.writes
    )


def _add_writers(
    node: fx.Node,
    aliases: AliasSets,
    position: Mapping[fx.Node, int],
    after: dict[fx.Node, dict[fx.Node, None]],
) -> None:
    """Put a node after the last write before it to memory that it touches, and before the next."""
    key: Callable[[fx.Node], int] = position.__getitem__
    for touched in (node, *node.all_input_nodes):
        writers = aliases.writers(touched)
        before = bisect_left(writers, position[node], key=key) - 1
        following = bisect_right(writers, position[node], key=key)
        if before >= 0:
            after[writers[before]][node] = None
        if following < len(writers):
            after[node][writers[following]] = None
