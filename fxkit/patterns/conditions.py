"""Predicates that rules share: each answers True, or says in words why not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Where, objection_of

UNKNOWN = "the types are not known; call propagate_types first"


def keeps_type(match: Match) -> bool | str:
    """Accept when `x` has the very type of the result: no promotion, broadcasting or new layout."""
    before, after = match.type("x"), result_type(match)
    if not isinstance(before, TensorType) or after is None:
        return UNKNOWN
    if before.dtype != after.dtype:
        return f"the operation turns {before} into {after}"
    if before.shape != after.shape:
        return f"the operation turns {before} into {after}"
    if before.device != after.device:
        return f"the operation moves {before.device} to {after.device}"
    return True if before.stride == after.stride else "the operation changes the memory layout"


def result_type(match: Match) -> TensorType | None:
    """Return the type of a match's root."""
    known = type_of(match.root)
    return known if isinstance(known, TensorType) else None


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Return the shape of a captured operand, or None when it is not known."""
    known = type_of(node) if isinstance(node, fx.Node) else None
    return known.shape if isinstance(known, TensorType) else None


def types_of(match: Match, names: tuple[str, ...]) -> list[TensorType] | None:
    """Return the types of some captures, or None when one is not known to be a tensor."""
    found = [match.type(name) for name in names if match.bindings.get(name) is not None]
    return found if all(isinstance(known, TensorType) for known in found) else None


def floating(*names: str) -> Where:
    """Accept real floating-point operands."""

    def check(known: TensorType) -> str | None:
        return None if known.dtype.is_floating_point else f"{known} is not floating point"

    return _each(names, check)


def signed(*names: str) -> Where:
    """Accept operands whose dtype has negative numbers."""

    def check(known: TensorType) -> str | None:
        fits = known.dtype.is_signed and known.dtype != torch.bool
        return None if fits else f"{known} has no negative numbers"

    return _each(names, check)


def contiguous(*names: str) -> Where:
    """Accept operands that lie densely in row-major order, so that every reshape is a view."""

    def check(known: TensorType) -> str | None:
        return None if known.is_contiguous else f"{known} is not contiguous"

    return _each(names, check)


def no_gradient(*names: str, why: str = "differs at the kink") -> Where:
    """Accept operands that autograd does not follow, where the derivative differs somewhere.

    Args:
        *names: The captures.
        why: What is said of the gradient.
    """

    def check(known: TensorType) -> str | None:
        return f"{known} wants a gradient, which {why}" if known.requires_grad else None

    return _each(names, check)


def unpromoted(*names: str) -> Where:
    """Accept operands of one dtype; numbers beside them where that is floating point.

    Integers of several widths wrap around at another place when they are computed in another order.
    """

    def accept(match: Match) -> bool | str:
        operands = [match.type(name) for name in names]
        tensors = [known for known in operands if isinstance(known, TensorType)]
        numbers = [known for known in operands if isinstance(known, (int, float))]
        if not tensors or len(tensors) + len(numbers) < len(names):
            return UNKNOWN
        dtypes = {known.dtype for known in tensors}
        if len(dtypes) > 1:
            return f"expected one dtype, got {' and '.join(str(known) for known in tensors)}"
        is_real = all(dtype.is_floating_point for dtype in dtypes)
        if dtypes == {torch.bool} or (numbers and not is_real):
            return f"{tensors[0]} is not floating point"
        return True

    return accept


def same_shape(*names: str) -> Where:
    """Accept operands of one shape: no broadcasting."""

    def accept(match: Match) -> bool | str:
        known = types_of(match, names)
        if known is None:
            return UNKNOWN
        if len({one.shape for one in known}) > 1:
            return f"expected one shape, got {' and '.join(str(one) for one in known)}"
        return True

    return accept


def not_empty(*names: str) -> Where:
    """Accept operands that have elements."""

    def check(known: TensorType) -> str | None:
        return f"{known} has no elements" if 0 in known.shape else None

    return _each(names, check)


def letters_agree(first: str, second: str) -> Where:
    """Accept operands of an einsum that have one size for each letter of its `equation`.

    An einsum repeats axes of size one, those that are summed over too; products of matrices don't.
    """

    def accept(match: Match) -> bool | str:
        known = types_of(match, (first, second))
        if known is None:
            return UNKNOWN
        sizes: dict[str, Any] = {}
        for one, letters in zip(known, einsum_terms(match["equation"]), strict=False):
            for letter, size in zip(letters, one.shape, strict=True):
                if sizes.setdefault(letter, size) != size:
                    return f"expected one size for {letter}, got {known[0]} and {known[1]}"
        return True

    return accept


def einsum_form(*forms: str) -> Callable[[Any], bool]:
    """Return what tells whether an equation of einsum is one of some forms, in any letters."""
    return lambda equation: any(_is_renamed(equation, form) for form in forms)


def einsum_terms(equation: str) -> list[str]:
    """Return the letters of each operand of an einsum, and of its result."""
    return re.split(",|->", equation.replace(" ", ""))


def _is_renamed(equation: Any, form: str) -> bool:
    if not isinstance(equation, str) or "->" not in equation:
        return False
    terms, wanted = einsum_terms(equation), einsum_terms(form)
    if [*map(len, terms)] != [*map(len, wanted)] or not "".join(terms).isalpha():
        return False
    pairs = set(zip("".join(wanted), "".join(terms), strict=True))
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def every(*conditions: Where) -> Where:
    """Accept what all conditions accept; the first objection is the reason."""

    def accept(match: Match) -> bool | str:
        reasons = (objection_of(condition(match)) for condition in conditions)
        return next((reason for reason in reasons if reason is not None), True)

    return accept


def is_number(value: Any) -> bool:
    """Tell whether a constant is a plain finite int or float."""
    return type(value) in (int, float) and value - value == 0


def is_zero(value: Any) -> bool:
    """Tell whether a constant is a zero without the sign of -0.0."""
    return is_number(value) and value == 0 and math.copysign(1.0, value) > 0


def _each(names: tuple[str, ...], check: Callable[[TensorType], str | None]) -> Where:
    def accept(match: Match) -> bool | str:
        known = types_of(match, names)
        if known is None:
            return UNKNOWN
        objections = (check(one) for one in known)
        return next((objection for objection in objections if objection is not None), True)

    return accept
