"""Match a pattern at a node: either a `Match`, or a `Miss` that says what stopped it.

The search goes from the root towards the operands and takes back a choice (the order of a
commutative operator's operands) when the rest fails. Orders that can't fit by structure are pruned
by a memo, so that the work stays proportional to the pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxkit.analysis.operator_names import shown_operator
from fxkit.ir.attributes import type_of_operand
from fxkit.ir.op import Attribute, operator_of, resolve
from fxkit.ir.printer import format_value
from fxkit.ir.types import TensorType, type_of
from fxkit.patterns.axes import same_axes
from fxkit.patterns.match_results import Match, Miss
from fxkit.patterns.multi_output import OutputSearch
from fxkit.patterns.pattern_nodes import (
    AnyOf,
    Capture,
    Chain,
    Constant,
    Named,
    Operation,
    Pattern,
    PatternNode,
    first_operators,
    is_same_constant,
    slice_parts,
)
from fxkit.torch_adapters.fx_nodes import order_key

_STEP_LIMIT = 20_000


def match_at(pattern: Pattern, node: fx.Node, *, commute: bool = True) -> Match | Miss:
    """Match a pattern with its root at one node.

    Args:
        pattern: The pattern.
        node: Where its root has to be.
        commute: Try the operands of commutative operators in both orders.
    """
    return _Search(pattern, node, commute).run()


def _place_of(item: tuple[Operation, fx.Node]) -> Any:
    return order_key(item[1])


_Continuation = Callable[[], bool]


class _Search:
    """One attempt; keeps the failure that came after the most matched operations."""

    def __init__(self, pattern: Pattern, root: fx.Node, commute: bool) -> None:
        self.pattern = pattern
        self.root = root
        self.commute = commute
        self.bindings: dict[str, Any] = {}
        self.nodes: dict[Operation, fx.Node] = {}
        self.values: dict[PatternNode, Any] = {}
        self.taken: dict[fx.Node, Operation] = {}
        self.steps = 0
        self.miss: Miss | None = None
        self._fits_memo: dict[tuple[int, fx.Node], bool] = {}

    def run(self) -> Match | Miss:
        owner = self.pattern.operations[-1]
        if self._value(self.pattern.root, self.root, owner, self.root, self._other_outputs):
            ordered: dict[Any, fx.Node] = dict(sorted(self.nodes.items(), key=_place_of))
            bindings = {k: v for k, v in self.bindings.items() if k[0] != "<"}
            values = {**self.nodes, **self.values} if self.values else ordered
            return Match(self.pattern, self.root, bindings, ordered, values)
        if self.miss is None:
            self._fail(owner, " or ".join(self.pattern.root_operators), "another node", self.root)
        return self.miss  # type: ignore[return-value]

    def _other_outputs(self) -> bool:
        """Find the outputs that are not below the root, among the users of what matched."""
        values = {**self.nodes, **self.values}
        missing = [output for output in self.pattern.outputs if output not in values]
        if not missing:
            return True
        climb = OutputSearch(self.bindings, values, self.taken)
        reached = [(output, climb.candidates(output)) for output in missing]
        known = [(output, nodes) for output, nodes in reached if nodes is not None]
        output, candidates = min(
            known, key=lambda pair: len(pair[1]), default=(missing[0], self._anywhere(missing[0]))
        )
        owner = output if isinstance(output, Operation) else self.pattern.operations[-1]
        for candidate in candidates:
            if self._value(output, candidate, owner, self.root, self._other_outputs):
                return True
        expected = f"{' or '.join(first_operators(output))} beside the root"
        return self._fail(owner, expected, "no such node", self.root)

    def _anywhere(self, output: PatternNode) -> list[fx.Node]:
        """Return the nodes that may be an output which shares nothing with what matched.

        The first that fits is taken, in the order of the graph. Cost: linear in the graph, for each
        place of the root.
        """
        names = set(first_operators(output))
        calls = ((node, operator_of(node)) for node in self.root.graph.nodes)
        return [
            node
            for node, operator in calls
            if operator is not None and operator.name in names and node not in self.taken
        ]

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
            got = shown_operator(node)
            return self._fail(wanted, wanted.operator, got, node)
        if node in self.taken:
            return self._fail(wanted, "a node of its own", f"%{node.name} for two", node)
        self.nodes[wanted] = node
        self.taken[node] = wanted
        has_same_form = call.arguments.keys() == wanted.arguments.keys()
        for order in self._orders(wanted):
            pairs = [
                _same_spelling(wanted, key, call.arguments.get(order.get(key, key)), node)
                for key in wanted.arguments
            ]
            if has_same_form and self._all(pairs, 0, wanted, node, rest):
                return True
        if not has_same_form:
            self._fail(wanted, str(wanted), f"{call.name}({', '.join(call.arguments)})", node)
        del self.nodes[wanted]
        del self.taken[node]
        return False

    def _orders(self, wanted: Operation) -> list[dict[str, str]]:
        if wanted.swaps is not None:
            return [{}, {"dim0": "dim1", "dim1": "dim0"}]
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
            if is_same_constant(wanted.value, value, False) or is_same_constant(
                wanted.value, value, is_floating(node)
            ):
                return rest()
            expected = _named_as(owner, wanted, format_value(wanted.value))
            return self._fail(owner, expected, format_value(value), node)
        if isinstance(wanted, Operation):
            if not isinstance(value, fx.Node):
                return self._fail(owner, wanted.operator, format_value(value), node)
            if not self._could_fit(wanted, value):
                return self._fail_below(wanted, value)
            return self._operation(wanted, value, rest)
        if isinstance(wanted, AnyOf):
            return any(
                self._value(choice, value, owner, node, self._noted(wanted, value, rest))
                for choice in wanted.choices
            )
        if isinstance(wanted, Named):
            noted = self._noted(wanted, value, rest)
            named = Capture(wanted.name)
            return self._value(
                wanted.inner,
                value,
                owner,
                node,
                lambda: self._capture(named, value, node, owner, noted),
            )
        if isinstance(wanted, Chain):
            return self._chain(wanted, value, owner, node, 0, self._noted(wanted, value, rest))
        if isinstance(wanted, (list, tuple)):
            if not isinstance(value, (list, tuple)) or len(value) != len(wanted):
                expected = _named_as(owner, wanted, f"a list of {len(wanted)}")
                return self._fail(owner, expected, format_value(value), node)
            return self._all(list(zip(wanted, value, strict=True)), 0, owner, node, rest)
        if isinstance(wanted, slice):
            if not isinstance(value, slice):
                return self._fail(owner, "a slice", format_value(value), node)
            pairs = list(zip(slice_parts(wanted), slice_parts(value), strict=True))
            return self._all(pairs, 0, owner, node, rest)
        return self._fail(owner, repr(wanted), format_value(value), node)

    def _noted(self, wanted: PatternNode, value: Any, rest: _Continuation) -> _Continuation:
        """Return a continuation that remembers what a pattern node matched."""

        def go_on() -> bool:
            if wanted in self.values and self.values[wanted] is not value:
                return False
            before = self.values.get(wanted)
            self.values[wanted] = value
            if rest():
                return True
            if before is None:
                del self.values[wanted]
            return False

        return go_on

    def _chain(
        self,
        wanted: Chain,
        value: Any,
        owner: Operation,
        node: fx.Node,
        length: int,
        rest: _Continuation,
    ) -> bool:
        """Match as many links as there are, then what the first link takes."""
        if length < wanted.at_most and isinstance(value, fx.Node):
            link, hole = wanted.next_link()

            def inner() -> bool:
                below = self.bindings.pop(hole.name)
                if self._chain(wanted, below, owner, value, length + 1, rest):
                    return True
                self.bindings[hole.name] = below
                return False

            if self._value(link, value, owner, node, inner):
                return True
        if length < wanted.at_least:
            return False
        return self._value(wanted.start, value, owner, node, rest)

    def _capture(
        self, wanted: Capture, value: Any, node: fx.Node, owner: Operation, rest: _Continuation
    ) -> bool:
        if wanted.name in self.bindings:
            bound = self.bindings[wanted.name]
            if is_same_binding(bound, value):
                return rest()
            return self._fail(
                owner,
                f"{format_value(bound)} again for {wanted.name!r}",
                format_value(value),
                node,
            )
        operand = self.pattern.operands.get(wanted.name)
        if operand is not None:
            objection = operand.objection(value, type_of_operand(value, self.root.graph))
            if objection is not None:
                return self._fail(owner, f"{objection[0]} for {wanted.name!r}", objection[1], node)
        self.bindings[wanted.name] = value
        if rest():
            return True
        self.bindings.pop(wanted.name, None)
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

    def _fail_below(self, wanted: Operation, node: fx.Node, below: int = 0) -> bool:
        """Record the failure at the first node, from here down, that does not fit by its operator.

        `below` counts the operations that fitted on the way.
        """
        call = resolve(node)
        if call is not None and call.name == wanted.operator:
            for key, inner in wanted.arguments.items():
                value = call.arguments.get(key)
                if isinstance(inner, Operation) and isinstance(value, fx.Node):
                    if not self._could_fit(inner, value):
                        return self._fail_below(inner, value, below + 1)
                elif isinstance(inner, Operation):
                    got = format_value(value)
                    return self._fail(wanted, inner.operator, got, node, below + 1)
        got = shown_operator(node)
        return self._fail(wanted, wanted.operator, got, node, below)

    def _fail(
        self, wanted: Operation, expected: str, got: str, node: fx.Node, below: int = 0
    ) -> bool:
        matched = len(self.nodes) + below
        if self.miss is None or matched > self.miss.matched:
            self.miss = Miss(self.pattern, self.root, matched, expected, got, node, wanted.source)
        return False


def _named_as(owner: Operation, wanted: Any, text: str) -> str:
    """Return what was expected with the name of the argument that it is of, where that has one."""
    for key, argument in owner.arguments.items():
        parts = argument if isinstance(argument, (list, tuple)) else ()
        if not key.isdigit() and any(part is wanted for part in (argument, *parts)):
            return f"{text} for {key!r}"
    return text


def _same_spelling(wanted: Operation, key: str, value: Any, node: fx.Node) -> tuple[Any, Any]:
    """Return what an argument has to be, and what it is: axes in the pattern's own spelling."""
    argument = wanted.arguments[key]
    axes: Any = None
    if isinstance(argument, Constant):
        axes = argument.value
    elif isinstance(argument, (list, tuple)) and all(isinstance(a, Constant) for a in argument):
        axes = [a.value for a in argument]
    is_same = axes is not None and axes != value and same_axes(key, axes, value, node)
    return argument, axes if is_same else value


def is_same_binding(bound: Any, value: Any) -> bool:
    """Tell whether a capture that stands for one thing may stand for another."""
    return (
        bound is value
        or (not isinstance(bound, fx.Node) and is_same_constant(bound, value, False))
        or (isinstance(bound, Attribute) and bound == value)
    )


def is_floating(node: fx.Node) -> bool:
    """Tell whether every tensor operand of a node is known to be floating point."""
    types = [type_of(operand) for operand in node.all_input_nodes]
    return bool(types) and all(
        isinstance(t, TensorType) and (t.dtype.is_floating_point or t.dtype.is_complex)
        for t in types
    )
