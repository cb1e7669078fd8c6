"""Match a pattern at a node: either a `Match`, or a `Miss` that says what stopped it.

The search goes from the root towards the operands and takes back a choice (the order of a
commutative operator's operands) when the rest fails. Orders that can't fit by structure are pruned
by a memo, so that the work stays proportional to the pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Attribute, resolve
from fxkit.ir.printer import format_node, format_source, format_value
from fxkit.ir.types import TensorType, type_of
from fxkit.patterns.pattern import (
    Capture,
    Constant,
    Operation,
    Pattern,
    PatternNode,
    is_same_constant,
)

_STEP_LIMIT = 20_000


@dataclass(frozen=True)
class Match:
    """A place where a pattern occurs.

    Attributes:
        pattern: The pattern.
        root: The node that the pattern's root matched.
        bindings: Capture → what it stands for: a node, a constant, or an `Attribute`.
        nodes: The matched nodes by pattern operation, operands before users.
    """

    pattern: Pattern
    root: fx.Node
    bindings: dict[str, Any]
    nodes: dict[Operation, fx.Node]

    def __getitem__(self, capture: str) -> Any:
        return self.bindings[capture]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The matched nodes of the pattern's outputs."""
        return tuple(self.nodes[output] for output in self.pattern.outputs)

    @property
    def interior(self) -> list[fx.Node]:
        """The matched nodes that are no output of the pattern."""
        outputs = set(self.outputs)
        return [node for node in self.nodes.values() if node not in outputs]

    def type(self, capture: str) -> Any:
        """Return what is known of a capture's type: a `TensorType`, a Python value, or None."""
        value = self.bindings[capture]
        if isinstance(value, fx.Node):
            return type_of(value)
        if isinstance(value, Attribute):
            found: Any = self.root.graph.owning_module
            for atom in value.path.split("."):
                found = getattr(found, atom)
            return TensorType.of(found) if isinstance(found, torch.Tensor) else None
        return value

    def __str__(self) -> str:
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


def match_at(pattern: Pattern, node: fx.Node, *, commute: bool = True) -> Match | Miss:
    """Match a pattern with its root at one node.

    Args:
        pattern: The pattern.
        node: Where its root has to be.
        commute: Try the operands of commutative operators in both orders.
    """
    return _Search(pattern, node, commute).run()


_Continuation = Callable[[], bool]


class _Search:
    """One attempt; keeps the failure that came after the most matched operations."""

    def __init__(self, pattern: Pattern, root: fx.Node, commute: bool) -> None:
        self.pattern = pattern
        self.root = root
        self.commute = commute
        self.bindings: dict[str, Any] = {}
        self.nodes: dict[Operation, fx.Node] = {}
        self.taken: dict[fx.Node, Operation] = {}
        self.steps = 0
        self.miss: Miss | None = None
        self._fits_memo: dict[tuple[int, fx.Node], bool] = {}

    def run(self) -> Match | Miss:
        if self._operation(self.pattern.root, self.root, self._other_outputs):
            ordered = {op: self.nodes[op] for op in self.pattern.operations}
            return Match(self.pattern, self.root, dict(self.bindings), ordered)
        if self.miss is None:
            self._fail(self.pattern.root, self.pattern.root.operator, "another node", self.root)
        return self.miss  # type: ignore[return-value]

    def _other_outputs(self) -> bool:
        """Find the outputs that are not below the root, among the users of what matched."""
        missing = [output for output in self.pattern.outputs if output not in self.nodes]
        if not missing:
            return True
        output = missing[0]
        for candidate in self._candidates(output):
            if self._operation(output, candidate, self._other_outputs):
                return True
        self._fail(output, f"{output.operator} beside the root", "no such node", self.root)
        return False

    def _candidates(self, output: Operation) -> list[fx.Node]:
        """Return the users of something that `output` takes and that is bound already."""
        for argument in output.arguments.values():
            bound: Any = None
            if isinstance(argument, Capture):
                bound = self.bindings.get(argument.name)
            elif isinstance(argument, Operation):
                bound = self.nodes.get(argument)
            if isinstance(bound, fx.Node):
                return [user for user in bound.users if user not in self.taken]
        return []

    def _operation(self, wanted: Operation, node: fx.Node, rest: _Continuation) -> bool:
        self.steps += 1
        if self.steps > _STEP_LIMIT:
            return self._fail(wanted, "a match within the step limit", "too many orders", node)
        if wanted in self.nodes:
            same = self.nodes[wanted] is node
            return (
                rest()
                if same
                else self._fail(wanted, f"%{self.nodes[wanted].name} again", f"%{node.name}", node)
            )
        call = resolve(node)
        if call is None or call.name != wanted.operator:
            got = node.op if call is None else call.name
            return self._fail(wanted, wanted.operator, got, node)
        if node in self.taken:
            return self._fail(wanted, "a node of its own", f"%{node.name} for two", node)
        self.nodes[wanted] = node
        self.taken[node] = wanted
        for order in self._orders(wanted):
            pairs = [
                (wanted.arguments[key], call.arguments.get(order.get(key, key)))
                for key in wanted.arguments
            ]
            if len(call.arguments) == len(wanted.arguments) and self._all(
                pairs, 0, wanted, node, rest
            ):
                return True
        if len(call.arguments) != len(wanted.arguments):
            self._fail(wanted, str(wanted), f"{call.name}({', '.join(call.arguments)})", node)
        del self.nodes[wanted]
        del self.taken[node]
        return False

    def _orders(self, wanted: Operation) -> list[dict[str, str]]:
        if self.commute and wanted.is_commutative:
            return [{}, {"self": "other", "other": "self"}]
        return [{}]

    def _all(
        self,
        pairs: list[tuple[Any, Any]],
        index: int,
        wanted: Operation,
        node: fx.Node,
        rest: _Continuation,
    ) -> bool:
        if index == len(pairs):
            return rest()
        pattern_value, value = pairs[index]
        return self._value(
            pattern_value,
            value,
            wanted,
            node,
            lambda: self._all(pairs, index + 1, wanted, node, rest),
        )

    def _value(
        self, wanted: Any, value: Any, owner: Operation, node: fx.Node, rest: _Continuation
    ) -> bool:
        if isinstance(wanted, Capture):
            return self._capture(wanted, value, node, owner, rest)
        if isinstance(wanted, Constant):
            if is_same_constant(wanted.value, value, _is_floating(node)):
                return rest()
            return self._fail(owner, format_value(wanted.value), format_value(value), node)
        if isinstance(wanted, Operation):
            if not isinstance(value, fx.Node):
                return self._fail(owner, wanted.operator, format_value(value), node)
            if not self._could_fit(wanted, value):
                return self._fail_below(wanted, value)
            return self._operation(wanted, value, rest)
        if isinstance(wanted, (list, tuple)):
            if not isinstance(value, (list, tuple)) or len(value) != len(wanted):
                return self._fail(owner, f"a list of {len(wanted)}", format_value(value), node)
            return self._all(list(zip(wanted, value, strict=True)), 0, owner, node, rest)
        return self._fail(owner, repr(wanted), format_value(value), node)

    def _capture(
        self, wanted: Capture, value: Any, node: fx.Node, owner: Operation, rest: _Continuation
    ) -> bool:
        if wanted.name in self.bindings:
            bound = self.bindings[wanted.name]
            same = (
                bound is value
                or (not isinstance(bound, fx.Node) and is_same_constant(bound, value, False))
                or (isinstance(bound, Attribute) and bound == value)
            )
            if same:
                return rest()
            return self._fail(
                owner,
                f"{format_value(bound)} again for {wanted.name!r}",
                format_value(value),
                node,
            )
        self.bindings[wanted.name] = value
        if rest():
            return True
        del self.bindings[wanted.name]
        return False

    def _could_fit(self, wanted: PatternNode, node: fx.Node) -> bool:
        """Tell, by operators alone, whether an operation may match a node; remembered."""
        if not isinstance(wanted, Operation):
            return True
        key = (id(wanted), node)
        known = self._fits_memo.get(key)
        if known is None:
            call = resolve(node)
            known = call is not None and call.name == wanted.operator
            if known and call is not None and not wanted.is_commutative:
                known = all(
                    not (isinstance(w, Operation))
                    or (isinstance(v, fx.Node) and self._could_fit(w, v))
                    for w, v in ((w, call.arguments.get(k)) for k, w in wanted.arguments.items())
                )
            self._fits_memo[key] = known
        return known

    def _fail_below(self, wanted: Operation, node: fx.Node) -> bool:
        """Record the failure at the deepest node that does not fit by its operator."""
        call = resolve(node)
        if call is not None and call.name == wanted.operator:
            for key, inner in wanted.arguments.items():
                value = call.arguments.get(key)
                if isinstance(inner, Operation) and isinstance(value, fx.Node):
                    if not self._could_fit(inner, value):
                        return self._fail_below(inner, value)
                elif isinstance(inner, Operation):
                    return self._fail(wanted, inner.operator, format_value(value), node)
        got = node.op if call is None else call.name
        return self._fail(wanted, wanted.operator, got, node)

    def _fail(self, wanted: Operation, expected: str, got: str, node: fx.Node) -> bool:
        matched = len(self.nodes)
        if self.miss is None or matched > self.miss.matched:
            self.miss = Miss(self.pattern, self.root, matched, expected, got, node, wanted.source)
        return False


def _is_floating(node: fx.Node) -> bool:
    """Tell whether every tensor operand of a node is known to be floating point."""
    types = [type_of(operand) for operand in node.all_input_nodes]
    return bool(types) and all(
        isinstance(t, TensorType) and (t.dtype.is_floating_point or t.dtype.is_complex)
        for t in types
    )
