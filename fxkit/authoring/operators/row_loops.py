"""Reading `for x in row`: what each step adds to a total, or takes an extreme of, is a reduction.

The body is read once, for any element. What a name stands for after it has to be what it stood for
before plus something, or the larger or smaller of it and something, where the condition of a path
may choose whether: that something, of all elements, is summed or compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fxkit.authoring.operators.primitives import term
from fxkit.authoring.operators.terms import Term, const, in_order, is_const

_NONE = {"max": const(-math.inf), "min": const(math.inf)}

# Comparisons of an element with the extreme so far by which a step takes it.
_TAKES = {"max": ("gt", "lt"), "min": ("lt", "gt")}


def folded(after: Term, before: Term) -> tuple[str, Term] | None:
    """Return the reduction that a step of a loop is a part of, or None if it is none.

    Args:
        after: What a name stands for at the end of the step.
        before: The leaf that it stands for at the start.

    Returns:
        `add`, `max` or `min`, and the item that is folded.
    """
    added = _added(after, before)
    if added is not None:
        return ("add", added)
    for op in ("max", "min"):
        item = _extreme(after, before, op)
        if item is not None:
            return op, item
    return None


def depends(found: Term, leaf: Term) -> bool:
    """Tell whether a term is made of a leaf."""
    return leaf in in_order([found])


def _added(after: Term, before: Term) -> Term | None:
    if after is before:
        return const(0)
    if after.op in ("add", "sub") and depends(after, before):
        left, right = after.operands
        if after.op == "add" and depends(right, before):
            left, right = right, left
        found = None if depends(right, before) else _added(left, before)
        if found is None:
            return None
        if is_const(found, 0):
            return right if after.op == "add" else term("neg", right)
        return term(after.op, found, right)
    return _chosen(after, before, lambda path: _added(path, before))


def _extreme(after: Term, before: Term, op: str) -> Term | None:
    if after is before:
        return _NONE[op]
    if after.op == op:
        left, right = after.operands
        if depends(right, before):
            left, right = right, left
        found = None if depends(right, before) else _extreme(left, before, op)
        return right if found is _NONE[op] else found and term(op, found, right)
    if after.op == "select" and (item := _taken(after, before, op)) is not None:
        return item
    return _chosen(after, before, lambda path: _extreme(path, before, op))


def _taken(after: Term, before: Term, op: str) -> Term | None:
    """Return the item of `if x > best: best = x`, which leaves out what is not a number."""
    condition, item, other = after.operands
    if other is not before or len(condition.operands) != 2 or depends(item, before):
        return None
    first, second = _TAKES[op]
    is_it = condition.operands == (item, before) and condition.op == first
    is_it = is_it or (condition.operands == (before, item) and condition.op == second)
    return term("select", term("ne", item, item), _NONE[op], item) if is_it else None


def _chosen(after: Term, before: Term, read: Callable[[Term], Term | None]) -> Term | None:
    if after.op != "select" or depends(after.operands[0], before):
        return None
    condition, *paths = after.operands
    then, otherwise = (read(path) for path in paths)
    if then is None or otherwise is None:
        return None
    return term("select", condition, then, otherwise)
