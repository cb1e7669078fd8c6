"""Differentiating scalar expressions, by the chain rule from operands to results (forward mode).

The derivative of a choice is the choice of the derivatives, so what is not chosen has no say, be it
infinite or not a number. At kinks derivatives are those of torch: 0 for `abs` at 0, half for each
of two equal numbers whose maximum is taken, and that of the branch taken for an `if`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fxkit.authoring.operators.primitives import term
from fxkit.authoring.operators.terms import Term, const, in_order, is_const

Partials = Callable[..., Sequence[Term | None]]

_ONE, _ZERO = const(1.0), const(0.0)


def derivative(result: Term, by: Term) -> Term | None:
    """Return the derivative of a term by one of its operands; None where it is zero everywhere."""
    tangents: dict[Term, Term | None] = {}
    for one in in_order([result]):
        tangents[one] = _ONE if one is by else _tangent(one, [tangents[o] for o in one.operands])
    return tangents.get(result)


def product(a: Term | None, b: Term | None) -> Term | None:
    """Return a product, where None is zero."""
    if a is None or b is None:
        return None
    if a is _ONE:
        return b
    return a if b is _ONE else term("mul", a, b)


def total(a: Term | None, b: Term | None) -> Term | None:
    """Return a sum, where None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return term("add", a, b)


def _tangent(one: Term, tangents: list[Term | None]) -> Term | None:
    if all(tangent is None for tangent in tangents):
        return None
    if one.op == "select":
        return _chosen(one.operands[0], tangents[1], tangents[2])
    found: Term | None = None
    for tangent, partial in zip(tangents, partials_of(one), strict=False):
        found = total(found, product(partial, tangent))
    return found


def partials_of(one: Term) -> Sequence[Term | None]:
    """Return the derivative of a primitive by each of its operands; nothing where all are zero."""
    rule = _PARTIALS.get(one.op)
    return () if rule is None else rule(one, *one.operands)


def _chosen(condition: Term, a: Term | None, b: Term | None) -> Term | None:
    if a is None and b is None:
        return None
    return term("select", condition, a or _ZERO, b or _ZERO)


def _mul(a: Term, b: Term) -> Term:
    return product(a, b) or _ZERO


def _scaled(a: Term, factor: float) -> Term:
    return term("mul", a, const(factor))


def _inverse(a: Term) -> Term:
    return term("div", _ONE, a)


def _neg(a: Term) -> Term:
    return term("neg", a)


def _square(a: Term) -> Term:
    return term("mul", a, a)


def _plus(a: Term, b: float) -> Term:
    return term("add", a, const(b))


def _from_one(a: Term) -> Term:
    return term("sub", _ONE, a)


def _extremum(op: str) -> Partials:
    def partials(r: Term, a: Term, b: Term) -> tuple[Term, Term]:
        equal, first = term("eq", a, b), term("gt" if op == "max" else "lt", a, b)
        half = const(0.5)
        left = term("select", equal, half, term("select", first, _ONE, _ZERO))
        right = term("select", equal, half, term("select", first, _ZERO, _ONE))
        return left, right

    return partials


def _copysign(r: Term, a: Term, b: Term) -> tuple[Term, None]:
    is_zero = term("eq", a, const(0.0))
    return term("select", is_zero, _ZERO, term("div", r, a)), None


def _pow(r: Term, a: Term, b: Term) -> tuple[Term, Term]:
    slope = _mul(b, term("pow", a, term("sub", b, _ONE)))
    if not is_const(b):
        slope = term("select", term("eq", b, const(0.0)), _ZERO, slope)
    at_zero = term("and", term("eq", a, const(0.0)), term("ge", b, const(0.0)))
    by_exponent = term("select", at_zero, _ZERO, _mul(r, term("log", a)))
    return slope, by_exponent


def _atan2(r: Term, a: Term, b: Term) -> tuple[Term, Term]:
    norm = term("add", _square(a), _square(b))
    return term("div", b, norm), _neg(term("div", a, norm))


def _nextafter(r: Term, a: Term, b: Term) -> tuple[Term, None]:
    return term("select", term("eq", a, b), _ZERO, _ONE), None


def _root_of(a: Term) -> Term:
    return _inverse(term("sqrt", a))


# Bernoulli's numbers B(2n) / 2n, from n = 7 down.
_BERNOULLI = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)


def _digamma(a: Term) -> Term:
    """Return the logarithmic derivative of gamma.

    Below ten by its recurrence, from there on by its asymptotic series; below one half by its
    reflection.
    """
    is_low = term("lt", a, const(0.5))
    x = term("select", is_low, _from_one(a), a)
    found: Term = _ZERO
    for _ in range(10):
        is_small = term("lt", x, const(10.0))
        found = term("sub", found, term("select", is_small, _inverse(x), _ZERO))
        x = term("select", is_small, _plus(x, 1.0), x)
    square, series = _inverse(_square(x)), _ZERO
    for coefficient in _BERNOULLI:
        series = term("mul", _plus(series, coefficient), square)
    found = term("add", found, term("sub", term("log", x), term("div", const(0.5), x)))
    found = term("sub", found, series)
    distance = term("sub", a, term("rint", a))
    cotangent = term("div", const(math.pi), term("tan", _scaled(distance, math.pi)))
    at_zero = term("copysign", const(math.inf), _neg(a))
    is_pole = term("eq", distance, const(0.0))
    reflected = term("select", is_pole, const(math.nan), term("sub", found, cotangent))
    reflected = term("select", term("eq", a, const(0.0)), at_zero, reflected)
    return term("select", is_low, reflected, found)


_TO_ERF = 2 / math.sqrt(math.pi)

_PARTIALS: dict[str, Partials] = {
    "add": lambda r, a, b: (_ONE, _ONE),
    "sub": lambda r, a, b: (_ONE, const(-1.0)),
    "mul": lambda r, a, b: (b, a),
    "div": lambda r, a, b: (_inverse(b), _neg(term("div", r, b))),
    "mod": lambda r, a, b: (_ONE, _neg(term("floor", term("div", a, b)))),
    "fmod": lambda r, a, b: (_ONE, _neg(term("trunc", term("div", a, b)))),
    "neg": lambda r, a: (const(-1.0),),
    "abs": lambda r, a: (term("sign", a),),
    "max": _extremum("max"),
    "min": _extremum("min"),
    "float": lambda r, a: (_ONE,),
    "copysign": _copysign,
    "hypot": lambda r, a, b: (term("div", a, r), term("div", b, r)),
    "atan2": _atan2,
    "nextafter": _nextafter,
    "pow": _pow,
    "sqrt": lambda r, a: (term("div", const(0.5), r),),
    "exp": lambda r, a: (r,),
    "exp2": lambda r, a: (_scaled(r, math.log(2)),),
    "expm1": lambda r, a: (_plus(r, 1.0),),
    "sigmoid": lambda r, a: (_mul(r, _from_one(r)),),
    "log": lambda r, a: (_inverse(a),),
    "log2": lambda r, a: (_inverse(_scaled(a, math.log(2))),),
    "log10": lambda r, a: (_inverse(_scaled(a, math.log(10))),),
    "log1p": lambda r, a: (_inverse(_plus(a, 1.0)),),
    "erf": lambda r, a: (_scaled(term("exp", _neg(_square(a))), _TO_ERF),),
    "erfc": lambda r, a: (_scaled(term("exp", _neg(_square(a))), -_TO_ERF),),
    "lgamma": lambda r, a: (_digamma(a),),
    "sin": lambda r, a: (term("cos", a),),
    "cos": lambda r, a: (_neg(term("sin", a)),),
    "tan": lambda r, a: (_plus(_square(r), 1.0),),
    "asin": lambda r, a: (_root_of(_from_one(_square(a))),),
    "acos": lambda r, a: (_neg(_root_of(_from_one(_square(a)))),),
    "atan": lambda r, a: (_inverse(_plus(_square(a), 1.0)),),
    "sinh": lambda r, a: (term("cosh", a),),
    "cosh": lambda r, a: (term("sinh", a),),
    "tanh": lambda r, a: (_from_one(_square(r)),),
    "asinh": lambda r, a: (_root_of(_plus(_square(a), 1.0)),),
    "acosh": lambda r, a: (_root_of(_plus(_square(a), -1.0)),),
    "atanh": lambda r, a: (_inverse(_from_one(_square(a))),),
}
