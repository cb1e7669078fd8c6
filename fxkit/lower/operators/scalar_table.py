"""The table of pointwise operators, and the words that its rows are written in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Operand, Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable


class Computes(Enum):
    """In which dtype an operator computes."""

    RESULT = "the dtype of its result"
    COMMON = "the dtype that its operands promote to"
    BOOL = "bool: each operand is compared with zero"
    OWN = "the dtype of each operand"
    KINDS = "floats in one dtype, integers in another; numbers stay Python numbers"


@dataclass(frozen=True)
class ScalarOp:
    """A row of the table.

    Attributes:
        name: Operator identity.
        build: Makes the scalar expression, or a tuple of them for several results.
        computes: In which dtype.
        tolerance: Largest difference from eager in units of the result dtype's epsilon, relative
            to max(1, |result|). 0: equal bits.
        exact_numbers: Operands that stay unrounded, where they are Python numbers, when the tensors
            are bf16 or f16.
        exact_single: Whether `other` stays unrounded as well where it is a tensor of one element.
        operands: Names of its operands.
        attributes: Names of its attributes. Three are no arguments of the operator: `result_dtype`,
            the dtype of its result, for rows that differ for bf16 and f16; `common_dtype`, the one
            that its operands promote to; and `require`, which leaves the call to eager, which
            raises, where a condition does not hold.
    """

    name: str
    build: Callable[..., Any]
    computes: Computes
    tolerance: float
    exact_numbers: tuple[str, ...]
    exact_single: bool
    operands: tuple[str, ...]
    attributes: tuple[str, ...]

    @property
    def checks(self) -> bool:
        """Whether eager raises for some values of its operands."""
        return "require" in self.attributes


TABLE: dict[str, ScalarOp] = {}


def row(
    *names: str,
    computes: Computes = Computes.RESULT,
    tolerance: float = 0,
    exact_numbers: tuple[str, ...] = (),
    exact_single: bool = False,
) -> Callable[[Callable[..., Ref]], Callable[..., Ref]]:
    """Add a pointwise operator to the table: the function says what one element of its result is.

    The positional parameters of the function are operands, converted to the dtype that is computed
    in; keyword-only ones are attributes. Both have the names of ATen's schema. `result_dtype`,
    `common_dtype` and `require` are no arguments of the operator; see `ScalarOp`.

    Args:
        names: The operators, as `resolve` names them.
        computes: In which dtype the function computes.
        tolerance: Largest difference from eager in units of the result dtype's epsilon, relative to
            max(1, |result|). 0: equal bits.
        exact_numbers: Operands that stay unrounded, where they are Python numbers, when the tensors
            are bf16 or f16.
        exact_single: Whether `other` stays unrounded as well where it is a tensor of one element.

    Returns:
        A decorator that returns the function as it is.

    Example:
        >>> from fxkit.lower.operators.scalar_table import TABLE, call, row
        >>> @row("mylib.hypot", tolerance=3)
        ... def _hypot(self, other):
        ...     return call("hypot", self, other)
        >>> TABLE.pop("mylib.hypot").operands
        ('self', 'other')
    """

    def add_row(build: Callable[..., Ref]) -> Callable[..., Ref]:
        parameters = inspect.signature(build).parameters.values()
        attributes = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        operands = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        for name in names:
            TABLE[name] = ScalarOp(
                name, build, computes, tolerance, exact_numbers, exact_single, operands, attributes
            )
        return build

    return add_row


def number(x: Ref) -> Number | None:
    """Return the number that `x` is, if it is a constant."""
    instruction = x.builder.body[x.position]
    return instruction.detail.value if instruction.op == "const" else None


def floats_only(x: Ref, what: str) -> None:
    """Leave a call with integers to eager; `what` names the operator in the reason."""
    if not x.is_float:
        raise Unfusable(f"{what} of integers is left to eager, which raises where it has no result")


def needs_full_width(x: Ref, dtype: torch.dtype) -> None:
    """Refuse results of 16 bits, where eager rounds each of several steps."""
    if x.dtype != dtype:
        raise Unfusable("eager computes it in 16 bits, step by step")


def call(function: str, *operands: Operand) -> Ref:
    """Apply a function of the loop IR to values and numbers, at least one of them a value."""
    first = next(operand for operand in operands if isinstance(operand, Ref))
    return first.builder.scalar(function, *operands)


def select(condition: Ref, then: Operand, otherwise: Operand) -> Ref:
    """Return `then` where the condition holds, else `otherwise`."""
    model = then if isinstance(then, Ref) else otherwise
    if not isinstance(model, Ref):
        raise TypeError("expected a value on at least one side of a select, got two numbers")
    a = then if isinstance(then, Ref) else model.builder.const(then, model.dtype)
    b = otherwise if isinstance(otherwise, Ref) else model.builder.const(otherwise, model.dtype)
    return model.builder.scalar("select", condition, a, b, dtype=model.dtype)


def const_like(x: Ref, value: Number) -> Ref:
    """Return a number in the dtype of `x`."""
    return x.builder.const(value, x.dtype)


def rounded_number(x: Ref, value: Number, dtype: torch.dtype) -> Ref:
    """Return a number as a dtype of memory has it, to compute with `x`."""
    return x.builder.const(value, dtype).cast(x.dtype)


def multiply_add(a: Ref, b: Operand, c: Ref) -> Ref:
    """Return a * b + c, rounded once where eager's vector code does."""
    return call("fma", a, b, c) if a.is_float else a * b + c
