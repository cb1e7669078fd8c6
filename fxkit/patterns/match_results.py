"""What matching a pattern at a node gives: a `Match`, or a `Miss` that says what stopped it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxkit.ir.attributes import type_of_operand
from fxkit.ir.printer import format_node, format_source, format_value
from fxkit.patterns.pattern_nodes import (
    Operation,
    Pattern,
    PatternNode,
)

_STEP_LIMIT = 20_000


class Match:
    """A place where a pattern occurs.

    Attributes:
        pattern: The pattern.
        root: The node that the pattern's root matched.
        bindings: Capture → what it stands for: a node, a constant, or an `Attribute`.
        nodes: The matched nodes by pattern operation, in graph order.
        values: Pattern node → what it matched, for operations, alternatives, chains and names.
        outputs: The matched nodes of the pattern's outputs.
        matched: The matched nodes.
        interior: The matched nodes that are no output of the pattern.
    """

    __slots__ = (
        "bindings", "interior", "matched", "nodes", "outputs", "pattern", "root", "values",
    )  # fmt: skip

    def __init__(
        self,
        pattern: Pattern,
        root: fx.Node,
        bindings: dict[str, Any],
        nodes: dict[Operation, fx.Node],
        values: dict[PatternNode, Any],
    ) -> None:
        self.pattern, self.root, self.bindings = pattern, root, bindings
        self.nodes, self.values = nodes, values
        self.outputs: tuple[fx.Node, ...] = tuple(map(values.__getitem__, pattern.outputs))
        self.matched = frozenset(nodes.values())
        self.interior = [node for node in nodes.values() if node not in self.outputs]

    def __getitem__(self, capture: str) -> Any:
        return self.bindings[capture]

    def type(self, capture: str) -> Any:
        """Return what is known of a capture's type: a `TensorType`, a Python value, or None."""
        return type_of_operand(self.bindings[capture], self.root.graph)

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={format_value(value)}" for key, value in self.bindings.items())
        return f"{self.pattern.name} at %{self.root.name} ({shown})"


@dataclass(frozen=True)
class Miss:
    """Why a pattern does not occur at a node.

    Attributes:
        pattern: The pattern.
        root: The node where matching began.
        matched: How many of the pattern's operations fitted before that.
        expected: What the pattern wanted.
        got: What was there.
        node: The node that stopped it, or None.
        pattern_source: The pattern's line, if it is known.
    """

    pattern: Pattern
    root: fx.Node
    matched: int
    expected: str
    got: str
    node: fx.Node | None = None
    pattern_source: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.pattern.name} at %{self.root.name}: {self.matched} of "
            f"{len(self.pattern)} operations matched",
            f"expected {self.expected}, got {self.got}",
        ]
        if self.node is not None:
            lines.append(f"  node:  {format_node(self.node)}")
            source = format_source(self.node)
            if source:
                lines.append(f"  from:  {source}")
        if self.pattern_source:
            lines.append(f"  rule:  {self.pattern_source}")
        return "\n".join(lines)
