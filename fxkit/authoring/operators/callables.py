"""What the functions of `math` and of Python that a scalar function may call are, as terms."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from functools import reduce

from fxkit.authoring.operators.primitives import PRIMITIVES, term, truth
from fxkit.authoring.operators.terms import Term, const, is_const

# Powers up to here are products.
_LARGEST_PRODUCT = 4


def power(base: Term, exponent: Term) -> Term:
    """Return a power; those of small whole exponents as products, as torch computes them."""
    value = exponent.value if is_const(exponent) else None
    if isinstance(value, (int, float)) and value in range(1, _LARGEST_PRODUCT + 1):
        return reduce(lambda a, b: term("mul", a, b), [base] * int(value))
    if value == 0.5:
        return term("sqrt", base)
    if isinstance(value, (int, float)) and -value in range(1, _LARGEST_PRODUCT + 1):
        return term("div", const(1.0), power(base, const(-int(value))))
    return term("pow", base, exponent)


def _fold(op: str) -> Callable[..., Term]:
    def folded(*values: Term) -> Term:
        if len(values) < 2:
            raise TypeError(f"expected at least two values, got {len(values)}")
        return reduce(lambda a, b: term(op, a, b), values)

    return folded


def _primitive(op: str, arity: int = 1) -> Callable[..., Term]:
    def applied(*values: Term) -> Term:
        if len(values) != arity:
            raise TypeError(f"expected {arity} arguments, got {len(values)}")
        return term(op, *values)

    return applied


def _log(x: Term, base: Term | None = None) -> Term:
    if base is None:
        return term("log", x)
    if is_const(base, 2) or is_const(base, 10):
        return term(f"log{int(base.value or 0)}", x)
    return term("div", term("log", x), term("log", base))


def _round(x: Term) -> Term:
    return term("rint", x)


def _cbrt(x: Term) -> Term:
    return term("copysign", term("pow", term("abs", x), const(1 / 3)), x)


def _ldexp(x: Term, exponent: Term) -> Term:
    return term("mul", x, term("exp2", exponent))


def _scaled(factor: float) -> Callable[[Term], Term]:
    return lambda x: term("mul", x, const(factor))


def _remainder(x: Term, y: Term) -> Term:
    return term("sub", x, term("mul", y, term("rint", term("div", x, y))))


FUNCTIONS: dict[Callable[..., object], Callable[..., Term]] = {
    # Primitives with the names of functions of `math`.
    **{
        getattr(math, primitive.op): _primitive(primitive.op, primitive.arity)
        for primitive in PRIMITIVES.values()
        if hasattr(math, primitive.op)
    },
    math.fabs: lambda x: term("abs", term("float", x)),
    math.pow: lambda x, y: power(term("float", x), y),
    math.log: _log,
    math.ldexp: _ldexp,
    math.degrees: _scaled(180 / math.pi),
    math.radians: _scaled(math.pi / 180),
    math.remainder: _remainder,
    builtins.abs: _primitive("abs"),
    builtins.max: _fold("max"),
    builtins.min: _fold("min"),
    builtins.pow: power,
    builtins.round: _round,
    builtins.float: _primitive("float"),
    builtins.int: _primitive("int"),
    builtins.bool: truth,
}
if hasattr(math, "cbrt"):
    FUNCTIONS[math.cbrt] = _cbrt


def functions_page() -> str:
    """Return the names of the functions that can be read, as the documentation prints them."""
    of_math = sorted(f.__name__ for f in FUNCTIONS if getattr(math, f.__name__, None) is f)
    of_python = sorted(f.__name__ for f in FUNCTIONS if hasattr(builtins, f.__name__))
    rows = {"`math`": of_math, "Python": sorted({*of_python, "all", "any", "sum"})}
    return "\n".join(
        ["| | |", "|---|---|"]
        + [f"| {home} | {', '.join(f'`{n}`' for n in names)} |" for home, names in rows.items()]
    )
