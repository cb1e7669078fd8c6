"""The primitives of scalar expressions: what kernels, torch and types make of each, in one row.

Kinds are Python's: a bool is an integer in arithmetic, a quotient and a function of `math` are
floats, a comparison is a bool. Which dtypes floats and integers have is known when an operator is
called; see `evaluation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from fxkit.authoring.operators.terms import CONST, Term, apply, const, in_order, is_const
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.scalar_functions import SCALAR_FUNCTIONS
from fxkit.lower.operators.integer_ops import floored_quotient, floored_rest
from fxkit.lower.operators.reduction_table import scanned
from fxkit.lower.operators.scalar_ops import TABLE
from fxkit.lower.operators.scalar_table import call, select
from fxkit.torch_adapters.modes import without_dispatch_modes


class Kind(Enum):
    """What a value is; a higher kind holds the values of a lower one."""

    BOOL = 0
    INTEGER = 1
    FLOAT = 2

    def __lt__(self, other: Kind) -> bool:
        return self.value < other.value

    def __gt__(self, other: Kind) -> bool:
        return self.value > other.value


# How the operands of a primitive are converted, and what the kind of its result is.
SAME = "same"  # all to the highest kind among them, which is the result's
ARITHMETIC = "arithmetic"  # the same, but bools to integers
REAL = "real"  # all to floats
TEST = "test"  # all to floats; a bool
COMPARE = "compare"  # all to the highest kind among them; a bool
LOGIC = "logic"  # all to bools
BITS = "bits"  # as `same`, but for floats, which have none
CHOICE = "choice"  # the first to a bool, the others as `same`
REDUCE = "reduce"  # one number of a row, or of a row up to each element; bools become integers
FIRST = "first"  # the first as it is; of the others only their places count
TO_FLOAT, TO_INTEGER = "to_float", "to_integer"


@dataclass(frozen=True, slots=True)
class Primitive:
    """A primitive.

    Attributes:
        op: Its name.
        rule: How kinds go through it; one of the constants above.
        build: Computes it in a kernel.
        compute: Computes it by torch.
        arity: How many operands it takes.
        takes_numbers: Whether torch's function takes a Python number for either operand.
    """

    op: str
    rule: str
    build: Callable[..., Ref]
    compute: Callable[..., torch.Tensor]
    arity: int = 1
    takes_numbers: bool = False


def _function(name: str) -> Callable[..., Ref]:
    return lambda *operands: call(name, *operands)


def _row(name: str) -> Callable[..., Ref]:
    return TABLE[name].build


def _by_kind(floats: Callable[..., Ref], integers: Callable[..., Ref]) -> Callable[..., Ref]:
    return lambda *xs: floats(*xs) if xs[0].is_float else integers(*xs)


def _unchanged(x: Any) -> Any:
    return x


def _rounding(name: str) -> Primitive:
    return Primitive(name, ARITHMETIC, _by_kind(_function(name), _unchanged), _ROUND[name])


def _only_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(x) if x.is_floating_point() else x


_ROUND = {
    "floor": _only_floats(torch.floor),
    "ceil": _only_floats(torch.ceil),
    "trunc": _only_floats(torch.trunc),
    "rint": _only_floats(torch.round),
}


def _binary(op: str, build: Any, compute: Any, rule: str = ARITHMETIC) -> Primitive:
    return Primitive(op, rule, build, compute, arity=2, takes_numbers=True)


def _real_functions() -> Iterator[Primitive]:
    """Yield a primitive for each scalar function of kernels that takes and returns floats."""
    # A power of integers is one too; no function of Python's is called `normal_cdf`.
    others = ("pow", "normal_cdf")
    for op, known in SCALAR_FUNCTIONS.items():
        if (known.is_call or op in ("sqrt", "copysign")) and op not in others:
            yield Primitive(op, REAL, _function(op), known.reference, known.arity)


def _sign(x: Ref) -> Ref:
    return (x > 0).cast(x.dtype) - (x < 0).cast(x.dtype)


def _is_nan(x: Ref) -> Ref:
    return x.differs(x)


def _is_infinite(x: Ref) -> Ref:
    return call("abs", x).equals(math.inf)


def _is_finite(x: Ref) -> Ref:
    return call("abs", x) < math.inf


def _pow(base: Ref, exponent: Ref) -> Ref:
    return TABLE["aten.pow"].build(base, exponent, result_dtype=base.dtype)


def _reduction(monoid: str, compute: Callable[..., torch.Tensor]) -> Primitive:
    def build(x: Ref) -> Ref:
        return x.builder.reduce(monoid, x)

    return Primitive(f"reduce_{monoid}", REDUCE, build, lambda x: compute(x, -1, keepdim=True))


def _extreme(function: Callable[..., torch.Tensor], sign: int) -> Callable[..., torch.Tensor]:
    """Return a reduction that gives what all numbers surpass, by a sign, for a row of none."""

    def found(x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
        if x.shape[dim]:
            return function(x, dim, keepdim=keepdim)
        least: float = sign * math.inf
        if not x.is_floating_point():
            limits = None if x.dtype is torch.bool else torch.iinfo(x.dtype)
            least = sign > 0 if limits is None else limits.max if sign > 0 else limits.min
        return x.new_full((*x.shape[:-1], 1), least)

    return found


def _scan(monoid: str, compute: Callable[..., torch.Tensor]) -> Primitive:
    def build(x: Ref) -> Ref:
        return scanned(monoid, x).cast(x.dtype)

    return Primitive(f"scan_{monoid}", REDUCE, build, compute)


def _extremes(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return lambda x: function(x, -1).values


def _wide(x: Ref, row: Ref) -> Ref:
    return select(row.equals(row), x, x)


def _comparison(op: str) -> Primitive:
    build = {"eq": Ref.equals, "ne": Ref.differs}.get(op) or getattr(Ref, f"__{op}__")
    return _binary(op, build, getattr(torch, op), COMPARE)


def _floored(a: Any, b: Any) -> torch.Tensor:
    # div has a derivative, unlike floor_divide.
    return _where_divided(lambda a, b: torch.div(a, b, rounding_mode="floor"), a, b)


def _rest(a: Any, b: Any) -> torch.Tensor:
    return _where_divided(torch.remainder, a, b)


def _where_divided(divide: Callable[[Any, Any], torch.Tensor], a: Any, b: Any) -> torch.Tensor:
    """Divide; of integers by zero 0, as in NumPy, where torch raises: all paths are computed."""
    if any(_is_float(value) for value in (a, b)):
        return divide(a, b)
    if not isinstance(b, torch.Tensor):
        return divide(a, b) if b else torch.zeros_like(a)
    is_zero = b == 0
    return divide(a, b.masked_fill(is_zero, 1)).masked_fill(is_zero, 0)


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else type(value) is float


def _shift(name: str) -> Callable[..., Ref]:
    return TABLE[f"aten.bitwise_{name}_shift"].build


_ROWS = (
    # --- arithmetic
    _binary("add", Ref.__add__, torch.add),
    _binary("sub", Ref.__sub__, torch.sub),
    _binary("mul", Ref.__mul__, torch.mul),
    _binary("div", Ref.__truediv__, torch.div, REAL),
    _binary("floordiv", _by_kind(_row("aten.floor_divide"), floored_quotient), _floored),
    _binary("mod", _by_kind(_row("aten.remainder"), floored_rest), _rest),
    Primitive("neg", ARITHMETIC, Ref.__neg__, torch.neg),
    Primitive("abs", ARITHMETIC, _row("aten.abs"), torch.abs),
    Primitive("sign", ARITHMETIC, _sign, torch.sign),
    Primitive("max", SAME, _row("aten.maximum"), torch.maximum, arity=2),
    Primitive("min", SAME, _row("aten.minimum"), torch.minimum, arity=2),
    # --- comparisons, logic, bits and choices
    *map(_comparison, ("lt", "le", "gt", "ge", "eq", "ne")),
    Primitive("and", LOGIC, Ref.__and__, torch.logical_and, arity=2),
    Primitive("or", LOGIC, Ref.__or__, torch.logical_or, arity=2),
    Primitive("not", LOGIC, Ref.__invert__, torch.logical_not),
    Primitive("bit_and", BITS, Ref.__and__, torch.bitwise_and, arity=2),
    Primitive("bit_or", BITS, Ref.__or__, torch.bitwise_or, arity=2),
    Primitive("bit_xor", BITS, Ref.__xor__, torch.bitwise_xor, arity=2),
    Primitive("bit_not", BITS, Ref.__invert__, torch.bitwise_not),
    Primitive("shl", BITS, _shift("left"), torch.bitwise_left_shift, arity=2),
    Primitive("shr", BITS, _shift("right"), torch.bitwise_right_shift, arity=2),
    Primitive("select", CHOICE, select, torch.where, arity=3),
    Primitive("isnan", TEST, _is_nan, torch.isnan),
    Primitive("isinf", TEST, _is_infinite, torch.isinf),
    Primitive("isfinite", TEST, _is_finite, torch.isfinite),
    # --- conversions and rounding
    Primitive("float", TO_FLOAT, _unchanged, _unchanged),
    Primitive("int", TO_INTEGER, _unchanged, _unchanged),
    *map(_rounding, ("floor", "ceil", "trunc", "rint")),
    # --- rows
    _reduction("add", torch.sum),
    _reduction("max", _extreme(torch.amax, -1)),
    _reduction("min", _extreme(torch.amin, 1)),
    _scan("add", lambda x: torch.cumsum(x, -1)),
    _scan("max", _extremes(torch.cummax)),
    _scan("min", _extremes(torch.cummin)),
    Primitive("row_wide", FIRST, _wide, lambda x, row: x, arity=2),
    # --- functions of `math`
    *_real_functions(),
    _binary("pow", _pow, torch.pow),
)

PRIMITIVES = {primitive.op: primitive for primitive in _ROWS}


def term(op: str, *operands: Term) -> Term:
    """Return a primitive of terms, computed where they are constants, and simplified.

    Nothing is simplified that changes the result of any float, infinite or not a number.
    """
    if op == "select" and is_const(operands[0]):
        return operands[1] if operands[0].value else operands[2]
    if op == "select" and operands[1] is operands[2]:
        return operands[1]
    if op in ("and", "or", "not") and (found := _logic(op, operands)) is not None:
        return found
    if all(o.op == CONST for o in operands):
        return const(value_of(op, *(o.value for o in operands)))
    return apply(op, *operands)


def _logic(op: str, operands: tuple[Term, ...]) -> Term | None:
    """Return what logic is without its constants and double negations; None if it has none."""
    if op == "not":
        (one,) = operands
        return one.operands[0] if one.op == "not" and is_bool(one.operands[0]) else None
    left, right = operands
    decisive = op == "or"
    for one, other in ((left, right), (right, left)):
        if is_const(one) and bool(one.value) == decisive:
            return const(decisive)
        if is_const(one) and is_bool(other):
            return other
        if one.op == "not" and one.operands[0] is other:
            return const(decisive)
    return left if left is right and is_bool(left) else None


_BOOLS = frozenset(
    {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "isnan", "isinf", "isfinite"}
)


def is_bool(found: Term) -> bool:
    """Tell whether a term is a bool, whatever its operands are."""
    if found.op == "select":
        return is_bool(found.operands[1]) and is_bool(found.operands[2])
    return found.op in _BOOLS or (found.op == CONST and isinstance(found.value, bool))


def truth(found: Term) -> Term:
    """Return whether a value is other than zero."""
    return found if is_bool(found) else term("ne", found, const(0))


def _plain_power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        return base**exponent
    return _computed(torch.pow, (base, exponent), torch.float64)


def _computed(
    compute: Callable[..., torch.Tensor], values: Iterable[Any], dtype: torch.dtype
) -> Any:
    # Fake tensors would give no number.
    with without_dispatch_modes():
        return compute(*[torch.tensor(v, dtype=dtype, device="cpu") for v in values]).item()


_PLAIN: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": abs,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "not": lambda a: not a,
    "and": lambda a, b: bool(a and b),
    "or": lambda a, b: bool(a or b),
    "select": lambda c, a, b: a if c else b,
    "float": float,
    "pow": _plain_power,
}


def value_of(op: str, *values: Any) -> Any:
    """Return a primitive of Python numbers, in float64 if it is of floats."""
    if op in _PLAIN:
        return _PLAIN[op](*values)
    primitive = PRIMITIVES[op]
    is_real = primitive.rule in (REAL, TEST) or any(isinstance(v, float) for v in values)
    dtype = torch.float64 if is_real else torch.int64
    if primitive.rule == TO_INTEGER:
        return int(values[0])
    return _computed(primitive.compute, values, dtype)


def substituted(results: Iterable[Term], leaves: Mapping[Term, Term]) -> tuple[Term, ...]:
    """Return terms with others in the place of some of their leaves."""
    results = tuple(results)
    new: dict[Term, Term] = {}
    for one in in_order(results):
        if one.operands:
            new[one] = term(one.op, *(new[operand] for operand in one.operands))
        else:
            new[one] = leaves.get(one, one)
    return tuple(new[result] for result in results)
