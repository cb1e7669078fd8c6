"""The replacement of a rule: its traced graph, and what of its operands' memory it may share."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.analysis.shared_memory import shares_memory
from fxkit.ir.op import Call, resolve
from fxkit.patterns.operand_checks import OperandRequirements
from fxkit.patterns.pattern_nodes import PatternNode
from fxkit.torch_adapters.operators import schema_of


@dataclass(frozen=True, eq=False)
class Template:
    """What a rule puts in place of a match.

    Attributes:
        graph: The traced replacement; its placeholders are the pattern's captures.
        values: What it returns: nodes of that graph, or constants.
        reuses: Nodes of the graph that stand for a matched node of the pattern.
    """

    graph: fx.Graph
    values: tuple[Any, ...]
    reuses: Mapping[fx.Node, PatternNode] = field(default_factory=dict)

    @functools.cached_property
    def inputs(self) -> frozenset[fx.Node]:
        """The nodes of the graph that its body or its values take."""
        used = {value for value in self.values if isinstance(value, fx.Node)}
        return frozenset(used.union(*(node.all_input_nodes for node in self.body)))

    @functools.cached_property
    def reused(self) -> tuple[PatternNode, ...]:
        """The pattern nodes whose matched nodes its body or its values take."""
        return tuple(self.reuses[node] for node in self.inputs if node in self.reuses)

    @functools.cached_property
    def is_all_new(self) -> bool:
        """Whether each of its values lies in memory of its own, as far as schemas tell."""
        return not any(self.shared)

    @functools.cached_property
    def shared(self) -> tuple[tuple[fx.Node, ...], ...]:
        """For each value the inputs whose memory it may share, by the schemas of what makes it."""
        return tuple(map(self._shared_by, self.values))

    def _shared_by(self, value: Any) -> tuple[fx.Node, ...]:
        if not isinstance(value, fx.Node):
            return ()
        if value not in self.body:
            return (value,)
        call = resolve(value)
        if call is None or (call.operator.overload is None and call.name != "python.getitem"):
            return ()
        shared = [o for o in effects_of(value).aliases if shares_memory(value, o) is not False]
        return tuple(dict.fromkeys(i for operand in shared for i in self._shared_by(operand)))

    @functools.cached_property
    def overlapping(self) -> tuple[tuple[int, int], ...]:
        """Which two of its values, by position, may share memory; parts of one split do not."""
        memories = [self._memory_of(value) for value in self.values]
        pairs = itertools.combinations(range(len(memories)), 2)
        return tuple(pair for pair in pairs if self._overlap(*(memories[p] for p in pair)))

    def _overlap(self, one: frozenset[fx.Node], other: frozenset[fx.Node]) -> bool:
        common = one & other
        apart = (a.args[0] for a in one for b in other if _are_parts(a, b))
        return bool(common) and not any(common <= self._memory_of(split) for split in apart)

    def _memory_of(self, value: Any) -> frozenset[fx.Node]:
        """Return the nodes of the graph whose memory a value may share, itself among them."""
        if not isinstance(value, fx.Node):
            return frozenset()
        below = effects_of(value).aliases if value in self.body else ()
        return frozenset({value}).union(*map(self._memory_of, below))

    @functools.cached_property
    def demands(self) -> OperandRequirements:
        """Which constants its operators take for the captures."""
        return OperandRequirements(self.body)

    @functools.cached_property
    def body(self) -> tuple[fx.Node, ...]:
        """The nodes that it makes, operands before users: those that its values need."""
        needed: set[fx.Node] = set()
        stack = [value for value in self.values if isinstance(value, fx.Node)]
        while stack:
            node = stack.pop()
            if node not in needed and node not in self.reuses and node.op != "placeholder":
                needed.add(node)
                stack.extend(node.all_input_nodes)
        return tuple(node for node in self.graph.nodes if node in needed)


def _are_parts(one: fx.Node, other: fx.Node) -> bool:
    """Tell whether two nodes are different parts of one value, counted from the front."""
    parts = _part(one), _part(other)
    if None in parts or parts[0] == parts[1]:
        return False
    return one.args[0] is other.args[0]


def _part(node: fx.Node) -> int | None:
    """Return which part of a value a node is; None when it is none, or counted from the end."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    whole, index = node.args
    split = resolve(whole) if isinstance(whole, fx.Node) else None
    is_split = split is not None and (split.name in _SPLITS or _returns_several(split))
    return index if is_split and type(index) is int and index >= 0 else None


def _returns_several(call: Call) -> bool:
    """Tell whether an operator returns several tensors, each in memory of its own."""
    overload = call.operator.overload
    returns = () if overload is None else schema_of(overload).returns
    return len(returns) > 1 and all(result.alias_info is None for result in returns)


# They give parts that do not overlap.
_SPLITS = frozenset(
    f"aten.{name}"
    for name in """
    chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind unsafe_chunk unsafe_split
    """.split()
)
