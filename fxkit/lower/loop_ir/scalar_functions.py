"""The table of scalar functions of the loop IR: what each consumer has to know of one, in one row.

The interpreter computes with `reference`, the scheduler counts `cost`, and the printers write C++
and CUDA by the other fields. A new function of the C library is one row: its name, a function of
torch and `library=True`. What a row leaves out has a default that is right, if slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.errors import InvalidGraphError

# Operations of a costly function; an addition is one.
COSTLY = 8

# A release of the C library in which every function is without vector versions.
NEVER = (1 << 16, 0)

Reference = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a function has a value, as C++ over `x`.

    The vector versions of the C library take many times as long where a function has no value:
    there they are given another number.

    Attributes:
        condition: Holds where the C library is to be asked.
        instead: The number that it is given elsewhere.
        outside: What the function is elsewhere.
    """

    condition: str
    instead: str
    outside: str


@dataclass(frozen=True, slots=True)
class Composition:
    """A function of float64 in terms of one of the C library.

    Attributes:
        calls: The operation of that function.
        text: C++ over `x`.
    """

    calls: str
    text: str


@dataclass(frozen=True, slots=True)
class ScalarFunction:
    """One scalar function of the loop IR.

    Attributes:
        op: Its name in the loop IR.
        reference: Computes it on tensors.
        arity: How many operands it takes.
        cost: Operations for one element; an addition is one.
        infix: The binary operator of C++ that computes it, if there is one.
        builtin: Whether the compiler makes a few instructions of `__builtin_<op>`.
        library: Whether the C library has it, as `<op>` for float64 and `<op>f` for float32.
        vector_since: The release of glibc that brought its vector version.
        own: Whether fxkit brings its own text for float32, `fx_<op>` of `vector_math`.
        composed: How float64 is computed where the C library lacks it.
        domain: Where it has a value, if not everywhere.
        near: fxkit's text that is several times as fast for operands near zero, for float32.
        cuda: CUDA's expression over `x` for float32, where it takes fewer instructions than `own`.
        in_lanes: Whether loops over explicit vectors have it: `gains` where they take fewer
            instructions than those that the compiler makes vectors of, `near` where they do for
            operands near zero, else `has` or None.
        is_brief: Whether one of it an element is computed while memory is waited for.
        unrolls: Whether loops over it gain from several vectors at a time (unroll and jam).
        coefficients: How many registers its coefficients take: `few`, `many` where they leave too
            few for several vectors of float32, or `two` where it has two polynomials.
        is_ordered: Whether instructions of an unrolled loop with it are to be scheduled before
            registers are given out.
    """

    op: str
    reference: Reference
    arity: int = 1
    cost: int = 1
    infix: str | None = None
    builtin: bool = False
    library: bool = False
    vector_since: tuple[int, int] = NEVER
    own: bool = False
    composed: Composition | None = None
    domain: Domain | None = None
    near: str | None = None
    cuda: str | None = None
    in_lanes: str | None = None
    is_brief: bool = False
    unrolls: bool = False
    coefficients: str = "few"
    is_ordered: bool = False

    @property
    def is_call(self) -> bool:
        """Whether it takes many instructions on floats, such as an exponential."""
        return self.own or self.library or self.composed is not None


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode=None if a.dtype.is_floating_point else "trunc")


def _fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).to(a.dtype)


def _normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + torch.erf(x * 0.5**0.5))


def _infix(op: str, sign: str, reference: Reference, **known: Any) -> ScalarFunction:
    return ScalarFunction(op, reference, arity=2, infix=sign, **known)


def _builtin(op: str, reference: Reference, **known: Any) -> ScalarFunction:
    return ScalarFunction(op, reference, builtin=True, **known)


def _library(
    op: str, reference: Reference, *, since: tuple[int, int] = NEVER, **known: Any
) -> ScalarFunction:
    known = {"cost": COSTLY, **known}
    return ScalarFunction(op, reference, library=True, vector_since=since, **known)


def _domain(condition: str, instead: str, edge: str = "", at_edge: str = "") -> Domain:
    """Describe a domain, and what the function is at its edge; beyond that it is no number."""
    outside = f"{edge} ? {at_edge} : {_NAN}" if edge else _NAN
    return Domain(condition, instead, outside)


_NAN = '__builtin_nanf("")'
_MINUS_INF, _SIGNED_INF = "-__builtin_inff()", "x * __builtin_inff()"
_UP_TO_ONE = _domain("(x >= -1.0f) & (x <= 1.0f)", "0.0f")
_BELOW_ONE = _domain("(x > -1.0f) & (x < 1.0f)", "0.0f", "(x == 1.0f) | (x == -1.0f)", _SIGNED_INF)
_POSITIVE = _domain("x > 0.0f", "1.0f", "x == 0.0f", _MINUS_INF)
_ABOVE_MINUS_ONE = _domain("x > -1.0f", "0.0f", "x == -1.0f", _MINUS_INF)

# The releases of glibc that brought vector functions.
_FIRST, _SECOND = (2, 22), (2, 35)

_ROWS = (
    # --- arithmetic
    _infix("add", "+", torch.add, in_lanes="has"),
    _infix("sub", "-", torch.sub, in_lanes="has"),
    _infix("mul", "*", torch.mul, in_lanes="has"),
    _infix("div", "/", _quotient, cost=COSTLY, in_lanes="has", unrolls=True),
    _infix("mod", "%", torch.fmod),
    ScalarFunction("neg", torch.neg, in_lanes="has"),
    ScalarFunction("abs", torch.abs, in_lanes="has"),
    ScalarFunction("max", torch.maximum, arity=2, in_lanes="has"),
    ScalarFunction("min", torch.minimum, arity=2, in_lanes="has"),
    ScalarFunction("fma", _fused_multiply_add, arity=3, in_lanes="has"),
    # --- comparisons, bits and choices
    _infix("lt", "<", torch.lt),
    _infix("le", "<=", torch.le),
    _infix("gt", ">", torch.gt),
    _infix("ge", ">=", torch.ge),
    _infix("eq", "==", torch.eq),
    _infix("ne", "!=", torch.ne),
    _infix("and", "&", torch.bitwise_and),
    _infix("or", "|", torch.bitwise_or),
    _infix("xor", "^", torch.bitwise_xor),
    _infix("shl", "<<", torch.bitwise_left_shift),
    _infix("shr", ">>", torch.bitwise_right_shift),
    ScalarFunction("not", torch.bitwise_not),
    ScalarFunction("select", torch.where, arity=3, in_lanes="has"),
    # --- rounding and roots
    _builtin("floor", torch.floor),
    _builtin("ceil", torch.ceil),
    _builtin("trunc", torch.trunc),
    _builtin("rint", torch.round),
    _builtin("sqrt", torch.sqrt, cost=COSTLY, in_lanes="has", unrolls=True),
    _builtin("copysign", torch.copysign, arity=2),
    # --- exponentials and logarithms
    _library(
        "exp", torch.exp, since=_FIRST, own=True, cuda="expf(x)", in_lanes="gains",
        is_brief=True, unrolls=True,
    ),
    _library("exp2", torch.exp2, since=_SECOND),
    _library("expm1", torch.expm1, since=_SECOND, own=True, in_lanes="gains", unrolls=True),
    _library(
        "log", torch.log, since=_FIRST, own=True, domain=_POSITIVE, cuda="logf(x)",
        in_lanes="has", unrolls=True,
    ),
    _library("log2", torch.log2, since=_SECOND, domain=_POSITIVE),
    _library("log10", torch.log10, since=_SECOND, domain=_POSITIVE),
    _library(
        "log1p", torch.log1p, since=_SECOND, own=True, domain=_ABOVE_MINUS_ONE, cuda="log1pf(x)",
        in_lanes="has", unrolls=True,
    ),
    _library("pow", torch.pow, arity=2, since=_FIRST),
    ScalarFunction(
        "sigmoid", torch.sigmoid, cost=COSTLY, own=True,
        composed=Composition("exp", "1.0 / (1.0 + exp(-x))"), in_lanes="gains", is_brief=True,
        unrolls=True,
    ),
    # --- error functions, gamma
    _library("erf", torch.erf, since=_SECOND, own=True, cuda="erff(x)", coefficients="many"),
    _library("erfc", torch.erfc, since=_SECOND),
    ScalarFunction(
        "normal_cdf", _normal_cdf, cost=COSTLY, own=True,
        composed=Composition("erf", "0.5 * (1.0 + erf(x * 0.70710678118654752440))"),
        in_lanes="gains", coefficients="many",
    ),
    _library("lgamma", torch.lgamma),
    # --- of angles
    _library(
        "sin", torch.sin, since=_FIRST, own=True, near="fx_near", in_lanes="near", unrolls=True,
        coefficients="two", is_ordered=True,
    ),
    _library(
        "cos", torch.cos, since=_FIRST, own=True, near="fx_near", in_lanes="near", unrolls=True,
        coefficients="two", is_ordered=True,
    ),
    _library("tan", torch.tan, since=_SECOND),
    _library("asin", torch.asin, since=_SECOND, domain=_UP_TO_ONE),
    _library("acos", torch.acos, since=_SECOND, domain=_UP_TO_ONE),
    _library("atan", torch.atan, since=_SECOND),
    _library("atan2", torch.atan2, arity=2, since=_SECOND),
    # --- hyperbolic
    _library("sinh", torch.sinh, since=_SECOND),
    _library("cosh", torch.cosh, since=_SECOND),
    _library(
        "tanh", torch.tanh, since=_SECOND, own=True, cuda="tanhf(x)", in_lanes="gains",
        unrolls=True, is_ordered=True,
    ),
    _library("asinh", torch.asinh, since=_SECOND),
    _library("acosh", torch.acosh, since=_SECOND, domain=_domain("x >= 1.0f", "2.0f")),
    _library("atanh", torch.atanh, since=_SECOND, domain=_BELOW_ONE),
    # --- of two numbers
    _library("fmod", torch.fmod, arity=2, near="fx_fmod"),
    _library("hypot", torch.hypot, arity=2, since=_SECOND),
    _library("nextafter", torch.nextafter, arity=2, cost=1, own=True),
)  # fmt: skip

SCALAR_FUNCTIONS = {function.op: function for function in _ROWS}


def named(holds: Callable[[ScalarFunction], bool]) -> frozenset[str]:
    """Return the names of the functions of which something holds."""
    return frozenset(op for op, function in SCALAR_FUNCTIONS.items() if holds(function))


def check_call(op: str, operands: int) -> None:
    """Refuse a call of what is no scalar function, or with another number of operands.

    Raises:
        InvalidGraphError: The table has no row for it, or one of another arity.
    """
    function = SCALAR_FUNCTIONS.get(op)
    if function is None:
        raise InvalidGraphError(
            f"expected a scalar function of the loop IR, got {op!r}",
            hint="add a row to fxkit/lower/loop_ir/scalar_functions.py",
        )
    if function.arity != operands:
        raise InvalidGraphError(f"expected {function.arity} operands of {op!r}, got {operands}")
