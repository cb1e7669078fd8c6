"""When attention that is spelled out is that of the operator: shapes, masks, hidden keys."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxkit.ir.types import TensorType, type_of
from fxkit.patterns.conditions import UNKNOWN, is_number, types_of
from fxkit.patterns.constants import constant_value, numbers_below
from fxkit.patterns.match_results import Match


def is_attention(match: Match, rank: int = 4) -> bool | str:
    """Accept q: [B, H, T, E], k: [B, H, S, E] and v: [B, H, S, F]; of rank 3, without H.

    Of tensors with one batch axis torch takes another path, which is slower than by hand: they get
    a second one.
    """
    known = types_of(match, ("q", "k", "v"))
    if known is None or len(known) < 3:
        return UNKNOWN
    q, k, v = known
    shown = f"q: {q}, k: {k} and v: {v}"
    if len({one.dtype for one in known}) > 1 or not q.dtype.is_floating_point:
        return f"expected one floating-point dtype, got {shown}"
    if len({one.shape[:-2] for one in known}) > 1 or len(q.shape) != rank:
        return f"expected the same batch and heads, got {shown}"
    axes = {match.bindings.get(name, -1 - at) for at, name in enumerate("ab")}
    if {axis % len(q.shape) for axis in axes} != {len(q.shape) - 2, len(q.shape) - 1}:
        return f"expected the last two axes of k: {k} to be transposed, got {axes}"
    for name in ("factor", "divisor"):
        if match.bindings.get(name) is not None and not _scales(match, name, q):
            return f"expected a number to scale by, got {name}={match[name]}"
    return _is_mask(match, q, k) if match.bindings.get("mask") is not None else True


def is_attention_of_matrices(match: Match) -> bool | str:
    return is_attention(match, rank=3)


def _scales(match: Match, name: str, q: TensorType) -> bool:
    """Tell whether scores are scaled by a number, or by a tensor that is known to hold just one."""
    number, known = _number_of(match[name]), match.type(name)
    keeps_dtype = not isinstance(known, TensorType) or not known.shape or known.dtype == q.dtype
    return number is not None and is_number(number) and number != 0 and keeps_dtype


def _is_mask(match: Match, q: TensorType, k: TensorType, name: str = "mask") -> bool | str:
    mask = match.type(name)
    if not isinstance(mask, TensorType):
        return UNKNOWN
    if mask.dtype != q.dtype:
        return f"expected a mask of {q}'s dtype, got {mask}"
    verdict = _fits_scores(mask, q, k)
    return verdict if verdict is not True else _leaves_a_key(match[name])


def _fits_scores(mask: TensorType, q: TensorType, k: TensorType) -> bool | str:
    scores = (*q.shape[:-1], k.shape[-2])
    sizes = zip(mask.shape[::-1], scores[::-1], strict=False)
    fits = len(mask.shape) <= len(scores) and all(size in (1, score) for size, score in sizes)
    return True if fits else f"expected a mask for scores {list(scores)}, got {mask}"


def mask_has_axes(match: Match) -> bool | str:
    """Accept no mask, or one of two axes at least, which is what the operator takes."""
    mask = match.type("mask") if match.bindings.get("mask") is not None else None
    is_flat = isinstance(mask, TensorType) and len(mask.shape) < 2
    return f"expected a mask of at least two axes, got {mask}" if is_flat else True


def mask_is_flat(match: Match) -> bool | str:
    """Accept a mask of one number a key, or of one for all."""
    mask = match.type("mask")
    is_flat = isinstance(mask, TensorType) and len(mask.shape) < 2
    return True if is_flat else f"expected a mask of at most one axis, got {mask}"


def _leaves_a_key(mask: Any) -> bool | str:
    """Refuse a mask of which a whole row is seen, or feared, to be -Inf: by hand that is NaN."""
    value = constant_value(mask)
    if isinstance(value, torch.Tensor):
        empty = value.dim() > 0 and bool((value == -math.inf).all(-1).any())
        return "a whole row of the mask is -Inf, which by hand gives NaN" if empty else True
    if -math.inf in numbers_below(mask):
        return "a whole row of the mask may be -Inf, which by hand gives NaN"
    return True


def _is_triangle(keep: torch.Tensor, q: TensorType, k: TensorType) -> bool:
    """Tell whether what is kept is what `is_causal` keeps: the lower triangle from the top left."""
    rows, columns = q.shape[-2], k.shape[-2]
    if keep.dim() < 2 or keep.shape[-2:] != (rows, columns):
        return False
    return bool((keep == torch.ones(rows, columns, dtype=torch.bool).tril()).all())


def is_causal(q: Any, k: Any, mask: Any) -> bool:
    """Tell whether an added mask is zero in the lower triangle and hides all above it."""
    value = constant_value(mask) if mask is not None else None
    if not isinstance(value, torch.Tensor):
        return False
    hides = value <= torch.finfo(value.dtype).min
    is_plain = bool((hides | (value == 0)).all())
    return is_plain and _is_triangle(~hides, type_of(q), type_of(k))


def unless_causal(q: Any, k: Any, mask: Any) -> Any:
    return None if is_causal(q, k, mask) else mask


def scale_of(factor: Any, divisor: Any) -> float:
    """Return what the scores are multiplied by."""
    multiplied, divided = (1 if v is None else _number_of(v) for v in (factor, divisor))
    return float((multiplied or 0) / (divided or 1))


def _number_of(value: Any) -> float | None:
    """Return a number that is given as it is, or as a tensor that holds just that."""
    found = constant_value(value)
    if isinstance(found, torch.Tensor):
        return found.item() if found.numel() == 1 else None
    return float(found) if type(found) in (int, float) else None


def hides(match: Match, is_last: bool = False) -> bool | str:
    """Accept a choice among scores and a number, where adding does what choosing does.

    A query from which all keys are hidden gives all of them the same weight, by hand; added to its
    scores, the number does that too when it is so large that they are lost to rounding.

    Args:
        match: The match.
        is_last: Whether a mask is added before the choice, which then takes its place.
    """
    known = types_of(match, ("q", "k"))
    name = "keep" if "keep" in match.bindings else "drop"
    choice, number = match.type(name), _number_of(match["fill"])
    if known is None or not isinstance(choice, TensorType):
        return UNKNOWN
    q, k = known
    verdict = _fits_scores(choice, q, k)
    if verdict is not True or choice.dtype != torch.bool:
        return verdict if choice.dtype == torch.bool else f"expected true or false, got {choice}"
    if number is None or not number <= -1e4:
        return f"expected a number that hides a score, got {match['fill']}"
    if number < torch.finfo(q.dtype).min:
        number = -math.inf
    is_lost = math.isfinite(number) and number * torch.finfo(q.dtype).eps < -2e6
    is_added = "mask" in match.bindings and not is_last
    if _keeps_a_key(match[name], name) and (is_lost or not is_added):
        return _wants_no_gradient(q, k) if is_added else True
    return (
        _wants_no_gradient(q, k)
        if is_lost
        else (f"all keys may be hidden from a query, and {number} then gives other weights by hand")
    )


def hides_last(match: Match) -> bool | str:
    return hides(match, is_last=True)


def _keeps_a_key(choice: Any, name: str) -> bool:
    """Tell whether it is known that each query sees a key."""
    value = constant_value(choice)
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    return bool((value if name == "keep" else ~value).any(-1).all())


def _wants_no_gradient(q: TensorType, k: TensorType) -> bool | str:
    """Where all keys are hidden from a query, a choice passes no gradient on, and a sum does."""
    if not (q.requires_grad or k.requires_grad):
        return True
    return "all keys may be hidden from a query, which then has another gradient by hand"


def is_future(q: Any, k: Any, drop: Any) -> bool:
    """Tell whether what is hidden is the future, and nothing else."""
    value = constant_value(drop)
    return isinstance(value, torch.Tensor) and _is_triangle(~value, type_of(q), type_of(k))


def unless_future(q: Any, k: Any, drop: Any, added: Any) -> Any:
    return None if is_future(q, k, drop) else added


def fill_for(q: Any, fill: Any) -> float:
    """Return what hides a score as a number of the queries' dtype."""
    number, known = _number_of(fill), type_of(q)
    assert number is not None and isinstance(known, TensorType)
    return number if number >= torch.finfo(known.dtype).min else -math.inf


def is_attention_with_two_masks(match: Match) -> bool | str:
    """Accept two masks of which at most one may hide keys, so that their sum hides no more."""
    verdict = is_attention(match)
    if verdict is not True:
        return verdict
    q, k, mask = match.type("q"), match.type("k"), match.type("mask")
    verdict = _is_mask(match, q, k, "other")
    if verdict is not True:
        return verdict
    axes = max(len(mask.shape), len(match.type("other").shape))
    if axes < 2:
        return f"expected a mask of at least two axes, got {mask} and {match.type('other')}"
    if all(_may_hide(match[name]) for name in ("mask", "other")):
        return "two masks may hide keys, and a whole row of them together, which by hand gives NaN"
    return True


def is_attention_less_a_mask(match: Match) -> bool | str:
    """Accept a mask that is subtracted and has no infinite number, as far as that is seen."""
    verdict = is_attention(match)
    if verdict is not True:
        return verdict
    value = constant_value(match["mask"])
    numbers = numbers_below(match["mask"])
    is_infinite = bool(value.isinf().any()) if isinstance(value, torch.Tensor) else False
    if is_infinite or not numbers.isdisjoint((math.inf, -math.inf)):
        return "a whole row of the mask may be infinite, which by hand gives NaN"
    return mask_has_axes(match)


def _may_hide(mask: Any) -> bool:
    """Tell whether a mask has numbers, or may have, of which two are -Inf together."""
    value = constant_value(mask)
    if isinstance(value, torch.Tensor):
        return bool((value < torch.finfo(value.dtype).min / 2).any())
    known = type_of(mask)
    least = torch.finfo(known.dtype).min if isinstance(known, TensorType) else -math.inf
    return min(numbers_below(mask), default=0.0) < least / 2
