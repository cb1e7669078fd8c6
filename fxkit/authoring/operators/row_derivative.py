"""Differentiating functions of rows, from their results to their operands (reverse mode).

What each term adds to the gradient of its operands follows from its partial derivatives; a sum over
the row gives its gradient to all elements, a maximum to the elements that are it, in equal parts,
as `torch.amax` does. A gradient that a choice sets to zero stays zero, whatever it is multiplied
by, so that paths that are not taken add no NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxkit.authoring.operators.derivative import partials_of, total
from fxkit.authoring.operators.primitives import term
from fxkit.authoring.operators.row_values import is_wide, running, total_of
from fxkit.authoring.operators.terms import Term, const, in_order, is_const
from fxkit.errors import UnsupportedError

_ONE, _ZERO = const(1.0), const(0.0)


def row_gradient(results: Sequence[Term], grads: Sequence[Term], by: Term) -> Term | None:
    """Return the gradient of results with respect to an operand; None where it is zero.

    Args:
        results: The results.
        grads: The gradient of each.
        by: The operand.
    """
    found: dict[Term, Term] = {}
    for result, grad in zip(results, grads, strict=True):
        _add(found, result, grad)
    for one in reversed(in_order(results)):
        if one in found and one is not by:
            for operand, part in _parts(one, found[one]):
                _add(found, operand, total_of(part) if _sums(one, operand) else part)
    return found.get(by)


def _add(found: dict[Term, Term], one: Term, part: Term) -> None:
    found[one] = total(found.get(one), part) or part


def _sums(one: Term, operand: Term) -> bool:
    """Tell whether one number a row is read at each of its elements."""
    return is_wide(one) and not is_wide(operand)


def _parts(one: Term, grad: Term) -> Iterator[tuple[Term, Term]]:
    """Yield each operand of a term with what the term adds to its gradient."""
    if one.op == "select":
        condition, a, b = one.operands
        yield a, term("select", condition, grad, _ZERO)
        yield b, term("select", condition, _ZERO, grad)
    elif one.op == "row_wide" or one.op == "reduce_add":
        yield one.operands[0], grad
    elif one.op in ("reduce_max", "reduce_min"):
        (operand,) = one.operands
        is_it = term("eq", operand, one)
        count = total_of(term("select", is_it, _ONE, _ZERO))
        yield operand, term("select", is_it, term("div", grad, count), _ZERO)
    elif one.op == "scan_add":
        # An element is in all sums from its own on: all of them, less those before it.
        before = term("sub", running("add", grad), grad)
        yield one.operands[0], term("sub", total_of(grad), before)
    elif one.op in ("scan_max", "scan_min"):
        raise UnsupportedError(
            "expected sums among scans to differentiate, got a running extreme",
            hint="pass gradient= to fxkit.row_operator",
        )
    else:
        for operand, partial in zip(one.operands, partials_of(one), strict=False):
            if partial is not None:
                yield operand, _product(grad, partial)


def _product(grad: Term, partial: Term) -> Term:
    """Return a product that is zero wherever a choice has set the gradient to zero."""
    if grad.op == "select":
        condition, a, b = grad.operands
        if is_const(b, 0):
            return term("select", condition, _product(a, partial), _ZERO)
        if is_const(a, 0):
            return term("select", condition, _ZERO, _product(b, partial))
    if is_const(partial, 1.0):
        return grad
    return term("mul", grad, partial)
