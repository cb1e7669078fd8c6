"""Evaluating scalar expressions: as loop IR, by torch, or to see which dtypes results have.

An operator of tensors computes floats in one dtype and integers in another: those that its tensors
of either kind promote to. bfloat16 and float16 are computed in float32, and results are rounded
once. What is made of Python numbers alone is computed by Python, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from fxkit.authoring.operators.primitives import (
    ARITHMETIC,
    BITS,
    CHOICE,
    COMPARE,
    FIRST,
    LOGIC,
    PRIMITIVES,
    REAL,
    REDUCE,
    TEST,
    TO_FLOAT,
    TO_INTEGER,
    Kind,
    Primitive,
    value_of,
)
from fxkit.authoring.operators.terms import CONST, NUMBER, OPERAND, ROW, Term, in_order
from fxkit.lower.loop_ir.bits import Bits, Number
from fxkit.lower.loop_ir.builder import Builder, Ref, round_number
from fxkit.lower.loop_ir.loop_ir import Instruction, register_of
from fxkit.lower.loop_ir.runtime_parameters import (
    RuntimeFloat,
    RuntimeInt,
    RuntimeValue,
    is_runtime,
)

Value = TypeVar("Value")


@functools.cache
def core_forms() -> dict[str, Callable[..., torch.Tensor]]:
    """Return those primitives for which core operators have no name, by others."""
    # Here, since it loads all passes, which calls do not need.
    from fxkit.passes.decomposition import special_functions

    return {
        "copysign": special_functions.copysign,
        "erfc": special_functions.erfc,
        "exp2": special_functions.exp2,
        "hypot": special_functions.hypot,
        "lgamma": special_functions.lgamma,
        "nextafter": special_functions.nextafter,
        "select": special_functions.chosen,
        "scan_max": lambda x: special_functions.running_extreme(True)(x, -1)[0],
        "scan_min": lambda x: special_functions.running_extreme(False)(x, -1)[0],
    }


@dataclass(frozen=True, slots=True)
class Dtypes:
    """In which dtypes an operator computes.

    Attributes:
        floats: That of floats, as memory has it.
        integers: That of integers.
    """

    floats: torch.dtype
    integers: torch.dtype

    @classmethod
    def of(cls, common: torch.dtype, integers: Iterable[torch.dtype]) -> Dtypes:
        """Return them for operands.

        Args:
            common: What all operands promote to.
            integers: Dtypes of those operands that are integers.
        """
        if common.is_floating_point:
            floats, known = common, list(integers)
            return cls(floats, _promoted(known) if known else torch.int64)
        return cls(torch.get_default_dtype(), torch.int64 if common is torch.bool else common)

    @property
    def computed(self) -> torch.dtype:
        """That in which floats are computed."""
        return register_of(self.floats)

    def of_kind(self, kind: Kind) -> torch.dtype:
        """Return that in which values of a kind are computed."""
        return (torch.bool, self.integers, self.computed)[kind.value]


def _promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def kind_of_dtype(dtype: torch.dtype) -> Kind:
    """Return the kind of values of a dtype."""
    if dtype.is_complex:
        raise TypeError(f"expected real tensors, got {dtype}")
    if dtype is torch.bool:
        return Kind.BOOL
    return Kind.FLOAT if dtype.is_floating_point else Kind.INTEGER


def kind_of_number(value: Number) -> Kind:
    """Return the kind of a Python number."""
    if isinstance(value, bool):
        return Kind.BOOL
    return Kind.FLOAT if isinstance(value, float) else Kind.INTEGER


class Computer(Protocol[Value]):
    """What computes primitives of values of one sort."""

    def kind(self, value: Value) -> Kind:
        """Return the kind of a value."""
        ...

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Convert a value."""
        ...

    def number(self, value: Number, dtype: torch.dtype, kind: Kind, where: str) -> Any:
        """Return a Python number as an operand of a primitive that computes in a dtype."""
        ...

    def apply(self, primitive: Primitive, values: Sequence[Any]) -> Value:
        """Compute a primitive of values that have been converted as its rule says."""
        ...


class ScalarEvaluation(Generic[Value]):
    """Evaluates terms; numbers stay Python numbers as long as nothing else takes part.

    Args:
        computer: Computes primitives.
        dtypes: In which dtypes.
        operands: Name → value of a tensor operand.
        numbers: Name → Python number.
    """

    def __init__(
        self,
        computer: Computer[Value],
        dtypes: Dtypes,
        operands: Mapping[str, Value],
        numbers: Mapping[str, Number],
    ) -> None:
        self._computer = computer
        self._dtypes = dtypes
        self._operands = operands
        self._numbers = numbers
        self._known: dict[Term, Any] = {}

    def result(self, term: Term) -> Value:
        """Return the value of a term, in the dtype that values of its kind are computed in."""
        for one in in_order([term]):
            if one not in self._known:
                self._known[one] = self._value(one)
        kind = self._kind(self._known[term])
        return self._converted(self._known[term], kind, "result")

    def _value(self, term: Term) -> Any:
        if term.op == CONST:
            return term.value
        if term.op == NUMBER:
            return self._numbers[str(term.value)]
        if term.op in (OPERAND, ROW):
            return self._operands[str(term.value)]
        values = [self._known[operand] for operand in term.operands]
        if all(isinstance(value, (bool, int, float)) for value in values):
            found = value_of(term.op, *values)
            is_varying = any(map(is_runtime, values))
            return varied(found, f"made_{len(self._known)}") if is_varying else found
        return self._applied(PRIMITIVES[term.op], values)

    def _kind(self, value: Any) -> Kind:
        if isinstance(value, (bool, int, float)):
            return kind_of_number(value)
        return self._computer.kind(value)

    def _converted(self, value: Any, kind: Kind, where: str) -> Any:
        dtype = self._dtypes.of_kind(kind)
        if isinstance(value, (bool, int, float)):
            return self._computer.number(_as_kind(value, kind), dtype, kind, where)
        if kind is Kind.BOOL and self._computer.kind(value) is not Kind.BOOL:
            return self._applied(PRIMITIVES["ne"], [value, 0])
        return self._computer.cast(value, dtype)

    def _applied(self, primitive: Primitive, values: list[Any]) -> Any:
        rule = primitive.rule
        if rule in (TO_FLOAT, TO_INTEGER):
            kind = Kind.FLOAT if rule == TO_FLOAT else Kind.INTEGER
            return self._converted(values[0], kind, primitive.op)
        if rule == FIRST:
            first = self._converted(values[0], self._kind(values[0]), primitive.op)
            return self._computer.apply(primitive, [first, *values[1:]])
        if rule == CHOICE:
            condition = self._converted(values[0], Kind.BOOL, "not")
            kind = max(map(self._kind, values[1:]))
            rest = [self._converted(value, kind, primitive.op) for value in values[1:]]
            return self._computer.apply(primitive, [condition, *rest])
        kind = self._operand_kind(rule, values)
        if rule == BITS and kind is Kind.FLOAT:
            raise TypeError(f"expected integers or bools for {primitive.op}, got floats")
        converted = [self._converted(value, kind, primitive.op) for value in values]
        return self._computer.apply(primitive, converted)

    def _operand_kind(self, rule: str, values: Sequence[Any]) -> Kind:
        if rule in (REAL, TEST):
            return Kind.FLOAT
        if rule == LOGIC:
            return Kind.BOOL
        kind = max(map(self._kind, values))
        return max(kind, Kind.INTEGER) if rule in (ARITHMETIC, REDUCE) else kind


def _as_kind(value: Number, kind: Kind) -> Number:
    converted = (bool, int, float)[kind.value](value)
    if not isinstance(value, RuntimeValue):
        return converted
    is_same = isinstance(converted, float) == isinstance(value, float)
    return varied(converted, value.text if is_same else f"{value.text}_converted")


def varied(value: Number, name: str) -> Number:
    """Return a number that a kernel is to read at run time, under a name; a bool as it is."""
    if isinstance(value, bool):
        return value
    return RuntimeFloat(value, name) if isinstance(value, float) else RuntimeInt(value, name)


class _NamedBits(Bits):
    """A number under a name, which equals that under another name only by chance."""

    __slots__ = ()

    def __init__(self, value: Number, name: str) -> None:
        super().__init__(value)
        self._key = (name,)


@dataclass(slots=True)
class KernelComputer:
    """Computes primitives in the body of a kernel."""

    builder: Builder

    def kind(self, value: Ref) -> Kind:
        return kind_of_dtype(value.dtype)

    def cast(self, value: Ref, dtype: torch.dtype) -> Ref:
        return value.cast(dtype)

    def number(self, value: Number, dtype: torch.dtype, kind: Kind, where: str) -> Ref:
        if not isinstance(value, RuntimeValue):
            return self.builder.const(value, dtype)
        rounded = varied(round_number(value, dtype), value.text)
        return self.builder.append(Instruction("const", (), dtype, _NamedBits(rounded, value.text)))

    def apply(self, primitive: Primitive, values: Sequence[Ref]) -> Ref:
        return primitive.build(*values)


@dataclass(frozen=True, slots=True)
class TorchComputer:
    """Computes primitives by torch.

    Attributes:
        device: Where numbers become tensors that torch takes in no other form.
        by_core: Whether it uses core operators alone; see `DecomposeToCore`.
    """

    device: torch.device
    by_core: bool = False

    def kind(self, value: torch.Tensor) -> Kind:
        return kind_of_dtype(value.dtype)

    def cast(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value if value.dtype == dtype else value.to(dtype)

    def number(self, value: Number, dtype: torch.dtype, kind: Kind, where: str) -> Any:
        primitive = PRIMITIVES.get(where)
        if primitive is not None and primitive.takes_numbers:
            return value
        return torch.full((), value, dtype=dtype, device=self.device)

    def apply(self, primitive: Primitive, values: Sequence[Any]) -> torch.Tensor:
        first = values[0]
        if self.by_core and primitive.op in core_forms():
            return core_forms()[primitive.op](*values)
        if isinstance(first, torch.Tensor):
            return primitive.compute(*values)
        if primitive.op in ("add", "mul"):
            return primitive.compute(values[1], first)
        other = torch.full((), first, dtype=values[1].dtype, device=self.device)
        return primitive.compute(other, values[1])


@dataclass(frozen=True, slots=True)
class KindComputer:
    """Finds out kinds: a value is its kind."""

    def kind(self, value: Kind) -> Kind:
        return value

    def cast(self, value: Kind, dtype: torch.dtype) -> Kind:
        return kind_of_dtype(dtype)

    def number(self, value: Number, dtype: torch.dtype, kind: Kind, where: str) -> Kind:
        return kind

    def apply(self, primitive: Primitive, values: Sequence[Kind]) -> Kind:
        if primitive.rule in (COMPARE, LOGIC, TEST):
            return Kind.BOOL
        return values[0] if primitive.rule == FIRST else values[-1]
