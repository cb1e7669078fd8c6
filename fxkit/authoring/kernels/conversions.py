"""Patterns with conversions in graphs that lack them: what is float32 already is not converted.

A norm that is written as `x.to(torch.float32) ... .to(x.dtype)` converts nothing where `x` is
float32, and a graph without what computes nothing has no such calls. So a pattern is looked for
without its conversions too, and what is found has to have the dtypes that make them superfluous.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxkit.ir.types import TensorType
from fxkit.patterns.inputs import captures_of, pattern_module
from fxkit.patterns.match_results import Match
from fxkit.patterns.pattern_nodes import Capture, Constant, Operation, Pattern
from fxkit.patterns.rewriting import Rule, conditions_of

_CONVERSIONS = frozenset({"aten.to", "aten.type_as"})

# Each may be there or not, so that the number of patterns doubles with each.
_MOST_CONVERSIONS = 4

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def with_dtypes(pattern: Pattern) -> Pattern:
    """Return a pattern whose conversions `x.to(y.dtype)` take dtypes, not tensors.

    What `y` is shows only where types are known, as they are in graphs that kernels are put into.
    """
    known: dict[Operation, Any] = {}
    for operation in pattern.operations:
        arguments = {k: _replaced(v, known) for k, v in operation.arguments.items()}
        if operation.operator == "aten.to" and _is_dtype(arguments.get("other")):
            arguments = {("dtype" if k == "other" else k): v for k, v in arguments.items()}
        is_same = arguments == dict(operation.arguments)
        known[operation] = operation if is_same else replace(operation, arguments=arguments)
    outputs = tuple(_replaced(output, known) for output in pattern.outputs)
    return pattern if outputs == pattern.outputs else replace(pattern, outputs=outputs)


def by_dtypes(rule: Rule, *, drops_conversions: bool) -> list[Rule]:
    """Return a rule, and the same for graphs of certain dtypes.

    In these `x.dtype` is the dtype that it is. The cost of matching grows with their number: 2 for
    each conversion, and 4 where a dtype is asked for.

    Args:
        rule: The rule, of a pattern of operations, captures and constants; one of another has no
            other forms.
        drops_conversions: Whether graphs lack conversions that change nothing.
    """
    pattern = rule.pattern
    if not all(isinstance(node, (Operation, Capture)) for node in _nodes(pattern.outputs)):
        return [rule]
    asks = any(_is_dtype(operation) for operation in pattern.operations)
    found = [o for o in pattern.operations if o.operator in _CONVERSIONS and _is_of_dtype(o)]
    droppable = found if drops_conversions and len(found) <= _MOST_CONVERSIONS else []
    made = [rule]
    for dtype in _FLOATS if asks else (None,):
        for count in range(0 if asks else 1, len(droppable) + 1):
            for dropped in itertools.combinations(droppable, count):
                form = _Form(rule, frozenset(dropped), dtype)
                outputs = form.outputs()
                if all(isinstance(output, Operation) for output in outputs):
                    _, where = conditions_of([form.holds, *([rule.where] if rule.where else [])])
                    spelled = replace(pattern, outputs=outputs)
                    made.append(replace(rule, pattern=spelled, where=where))
    return made


@dataclass(frozen=True)
class _Form:
    """A form of a rule's pattern.

    Attributes:
        rule: The rule.
        dropped: The conversions that it lacks.
        dtype: What `x.dtype` is, of any `x`; None where the pattern does not ask.
    """

    rule: Rule
    dropped: frozenset[Operation]
    dtype: torch.dtype | None

    def outputs(self) -> tuple[Any, ...]:
        """Return the outputs of the pattern in this form."""
        known: dict[Operation, Any] = {}
        for operation in self.rule.pattern.operations:
            known[operation] = self._formed(operation, known)
        return tuple(_replaced(output, known) for output in self.rule.pattern.outputs)

    def _formed(self, operation: Operation, known: Mapping[Operation, Any]) -> Any:
        if _is_dtype(operation):
            return Constant(self.dtype)
        arguments = {k: _replaced(v, known) for k, v in operation.arguments.items()}
        if operation in self.dropped:
            return arguments["self"]
        return replace(operation, arguments=arguments)

    def holds(self, match: Match) -> bool | str:
        """Accept a match whose dtypes are those of this form, or say why they are not."""
        values: dict[str, Any] = {}
        for name in captures_of(self.rule):
            known = match.type(name)
            if not isinstance(known, TensorType):
                values[name] = match[name]
            elif known.is_symbolic:
                return "sizes are not known"
            else:
                values[name] = torch.empty(known.shape, dtype=known.dtype, device="meta")
        results = _Observed(pattern_module(self.rule, values)).results_of(values)
        for operation, (taken, made) in zip(self.rule.pattern.operations, results, strict=True):
            if _is_dtype(operation) and made is not self.dtype:
                return f"its pattern asks for {made}, not {self.dtype}"
            if operation in self.dropped and taken != made.dtype:
                return f"its pattern converts {taken} to {made.dtype}"
        return True


class _Observed(fx.Interpreter):
    """Computes a pattern, and notes what each of its operations takes and makes."""

    def results_of(self, values: Mapping[str, Any]) -> list[tuple[torch.dtype | None, Any]]:
        """Return for each operation the dtype of its first operand, and its result."""
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        self.run(*tensors, enable_io_processing=False)
        return self._noted[len(tensors) :]  # the first of them copy the operands

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._noted: list[tuple[torch.dtype | None, Any]] = []
        nodes = list(module.graph.nodes)
        self._results = nodes[-1].all_input_nodes

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        is_call = n.op in ("call_function", "call_method")
        if is_call and n not in self._results and not _is_detached(n):
            first = n.all_input_nodes[0] if n.all_input_nodes else None
            taken = self.env.get(first) if first is not None else None
            self._noted.append((taken.dtype if isinstance(taken, torch.Tensor) else None, made))
        return made


def _is_detached(node: fx.Node) -> bool:
    return node.target is torch.detach


def _is_dtype(operation: Any) -> bool:
    """Tell whether an operation of a pattern asks for the dtype of a tensor."""
    if not isinstance(operation, Operation) or operation.operator != "python.getattr":
        return False
    name = operation.arguments.get("1")
    return isinstance(name, Constant) and name.value == "dtype"


def _is_of_dtype(operation: Operation) -> bool:
    """Tell whether a conversion is to a dtype alone."""
    given = {k: v for k, v in operation.arguments.items() if k != "self"}
    known = {k: v.value for k, v in given.items() if isinstance(v, Constant)}
    return not known.get("copy") and known.get("device") is None and "device" not in (
        given.keys() - known.keys())  # fmt: skip


def _replaced(value: Any, known: Mapping[Operation, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, known) for item in value)
    return known.get(value, value) if isinstance(value, Operation) else value


def _nodes(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of a pattern, but for constants; a slice is none that is known here."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _nodes(value)
        elif isinstance(value, Operation):
            yield value
            yield from _nodes(value.arguments.values())
        elif not isinstance(value, Constant):
            yield value
