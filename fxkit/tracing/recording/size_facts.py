"""Facts about symbolic sizes become guards."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxkit.analysis.tensor_types import TypeAnalysis
from fxkit.analysis.type_inference.size_expressions import (
    compiled,
    is_over,
    named,
    names_in,
    python_text,
)
from fxkit.errors import FxkitError
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import TensorType, type_of
from fxkit.tracing.guarding.size_guards import SizeGuard
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.recording.size_recorder import SizeFact
from fxkit.tracing.values.refusals import Refusal
from fxkit.tracing.values.symbolic_scalars import INFIX

_CALLS = {math.ceil: "math.ceil", math.floor: "math.floor", operator.neg: "-"}


@dataclass(frozen=True, slots=True)
class SymbolicSize:
    """One symbolic size.

    Attributes:
        name: How types call it: `s0`.
        shown: How the user would write it: `x.shape[0]`.
        index: Which tensor argument.
        axis: Which of its axes.
        size: What it was at capture.
    """

    name: str
    shown: str
    index: int
    axis: int
    size: int


class SizeFacts:
    """Turns what a run took for granted of symbolic sizes into guards.

    Args:
        sizes: The symbolic sizes.
        numbers: The value of each node that computes a number of sizes.
    """

    def __init__(self, sizes: Sequence[SymbolicSize], numbers: dict[fx.Node, Any]) -> None:
        self._sizes = {size.name: size for size in sizes}
        self._names = {size.name: size.shown for size in sizes}
        self._numbers = numbers
        self.guards: dict[str, SizeGuard] = {}

    def add_limits(self) -> None:
        """Sizes of 0 and 1 behave otherwise than all others: they broadcast, and make nothing."""
        for name in self._sizes:
            self._add(f"{name} >= 2", None)

    def add_relations(self, analysis: TypeAnalysis) -> None:
        """Add what types that hold expressions take for granted."""
        for symbol, node in analysis.relations:
            trace = None if node is None else node.meta.get("stack_trace")
            if not is_over(symbol, tuple(self._sizes)):
                continue  # the data decide it; the call itself checks it
            text = self._text(symbol)
            if "float" in text:
                raise Refusal(f"it depends on a rounded number of sizes: {text}")
            self._add(text, trace)

    def add_facts(self, facts: Sequence[SizeFact]) -> None:
        """Add what the program used of its sizes as it was."""
        for fact in facts:
            text = self.text_of(fact.node)
            if type(fact.value) is not bool:
                text = f"{text} == {fact.value!r}"
            elif not fact.value:
                text = f"not {text}" if _is_enclosed(text) else f"not ({text})"
            self._add(text, fact.source)

    def text_of(self, node: Any) -> str:
        """Return the expression that a node computes, with the operators of Python itself."""
        if not isinstance(node, fx.Node):
            return f"({node!r})" if isinstance(node, (int, float)) and node < 0 else repr(node)
        infix = INFIX.get(node.target)  # type: ignore[arg-type]
        if infix is not None:
            left, right = map(self.text_of, node.args)
            return f"({left} {infix} {right})"
        call = _CALLS.get(node.target)  # type: ignore[arg-type]
        if call is not None:
            return f"{call}({self.text_of(node.args[0])})"
        return self._leaf(node)

    def _leaf(self, node: fx.Node) -> str:
        """Return what a node reads of a tensor, as its type has it."""
        found = type_of(node)
        if not isinstance(found, Symbol):
            if found != self._numbers[node] or type(found) is not type(self._numbers[node]):
                raise Refusal(f"the size {node.name} is not to be told from the arguments")
            return repr(found)
        if not is_over(found, tuple(self._sizes)):
            raise Refusal(f"the size {node.name} depends on the numbers in a tensor")
        text = self._text(found)
        return text if text in self._sizes else f"({text})"

    def _text(self, symbol: Symbol) -> str:
        try:
            return python_text(symbol.expression)
        except FxkitError as error:
            raise Refusal(error.message) from error

    def _add(self, text: str, trace: str | None) -> None:
        if text.startswith("(") and text.endswith(")") and _is_enclosed(text):
            text = text[1:-1]
        used = tuple(name for name in self._sizes if name in names_in(text))
        if text in self.guards or text == "True":
            return
        sizes = [self._sizes[name] for name in used]
        guard = SizeGuard(
            named(text, self._names),
            source=source_text(trace),
            text=text,
            names=tuple(size.shown for size in sizes),
            places=tuple((size.index, size.axis) for size in sizes),
            function=compiled(text, used),
        )
        if not guard.holds([size.size for size in sizes]):
            raise Refusal(f"{guard.what} does not hold in the run that it was learnt in")
        if used:
            self.guards[text] = guard

    # What the types say, compared with what was there ---------------------------------------------

    def check_types(self, recorded: dict[fx.Node, Any]) -> None:
        """Compare types with those of the tensors of the run.

        Args:
            recorded: The type of each node in the run.

        Raises:
            Refusal: When they differ.
        """
        for node, before in recorded.items():
            if not self._is_like(before, type_of(node)):
                raise Refusal(f"the type of {node.name} can't be told for other sizes")

    def _is_like(self, before: Any, found: Any) -> bool:
        if isinstance(before, TensorType):
            return (
                isinstance(found, TensorType)
                and before.dtype is found.dtype
                and len(before.shape) == len(found.shape)
                and all(map(self._is_size, before.shape, found.shape))
            )
        if isinstance(before, (tuple, list)):
            return (
                isinstance(found, (tuple, list))
                and len(before) == len(found)
                and all(map(self._is_like, before, found))
            )
        return True

    def _is_size(self, before: int, found: Any) -> bool:
        if not isinstance(found, Symbol):
            return before == found
        if not is_over(found, tuple(self._sizes)):
            return True
        values = {s: self._sizes[str(s)].size for s in found.expression.free_symbols}
        return found.expression.subs(values) == before

    def fixed(self) -> set[str]:
        """Return the names of the symbolic sizes that turned out to have one value only."""
        found = set()
        for guard in self.guards.values():
            name, sign, value = guard.text.partition(" == ")
            if sign and name.strip("()") in self._sizes and value.strip("()").isdigit():
                found.add(name.strip("()"))
        return found


def _is_enclosed(text: str) -> bool:
    """Tell whether the first parenthesis of a text is closed by its last character."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return index == len(text) - 1
    return False
