"""Attention that was spelled out by hand, back to the operator that does it in one go."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from fxkit.ir.types import TensorType, type_of
from fxkit.patterns.conditions import UNKNOWN, every, is_number, types_of
from fxkit.patterns.constants import constant_value, numbers_below
from fxkit.patterns.language import any_of, computed, operand, optional
from fxkit.patterns.matching import Match
from fxkit.patterns.rewriting import rule


def _is_attention(match: Match) -> bool | str:
    """Accept q: [B, H, T, E], k: [B, H, S, E] and v: [B, H, S, F].

    Of tensors with one batch axis torch takes another path, which is slower than by hand.
    """
    known = types_of(match, ("q", "k", "v"))
    if known is None or len(known) < 3:
        return UNKNOWN
    q, k, v = known
    shown = f"q: {q}, k: {k} and v: {v}"
    if len({one.dtype for one in known}) > 1 or not q.dtype.is_floating_point:
        return f"expected one floating-point dtype, got {shown}"
    if len({one.shape[:-2] for one in known}) > 1 or len(q.shape) != 4:
        return f"expected the same batch and heads, got {shown}"
    axes = {match.bindings.get(name, -1 - at) for at, name in enumerate("ab")}
    if {axis % len(q.shape) for axis in axes} != {len(q.shape) - 2, len(q.shape) - 1}:
        return f"expected the last two axes of k: {k} to be transposed, got {axes}"
    return _is_mask(match, q, k) if match.bindings.get("mask") is not None else True


def _is_mask(match: Match, q: TensorType, k: TensorType) -> bool | str:
    mask = match.type("mask")
    if not isinstance(mask, TensorType):
        return UNKNOWN
    if mask.dtype != q.dtype:
        return f"expected a mask of {q}'s dtype, got {mask}"
    verdict = _fits_scores(mask, q, k)
    return verdict if verdict is not True else _leaves_a_key(match["mask"])


def _fits_scores(mask: TensorType, q: TensorType, k: TensorType) -> bool | str:
    scores = (*q.shape[:-1], k.shape[-2])
    sizes = zip(mask.shape[::-1], scores[::-1], strict=False)
    fits = len(mask.shape) <= len(scores) and all(size in (1, score) for size, score in sizes)
    return True if fits else f"expected a mask for scores {list(scores)}, got {mask}"


def _mask_has_axes(match: Match) -> bool | str:
    """Accept no mask, or one of two axes at least, which is what the operator takes."""
    mask = match.type("mask") if match.bindings.get("mask") is not None else None
    is_flat = isinstance(mask, TensorType) and len(mask.shape) < 2
    return f"expected a mask of at least two axes, got {mask}" if is_flat else True


def _mask_is_flat(match: Match) -> bool | str:
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


def _is_causal(q: Any, k: Any, mask: Any) -> bool:
    """Tell whether an added mask is zero in the lower triangle and hides all above it."""
    value = constant_value(mask) if mask is not None else None
    if not isinstance(value, torch.Tensor):
        return False
    hides = value <= torch.finfo(value.dtype).min
    is_plain = bool((hides | (value == 0)).all())
    return is_plain and _is_triangle(~hides, type_of(q), type_of(k))


def _unless_causal(q: Any, k: Any, mask: Any) -> Any:
    return None if _is_causal(q, k, mask) else mask


def _scale(factor: Any, divisor: Any) -> float:
    """Return what the scores are multiplied by."""
    return float((1 if factor is None else factor) / (1 if divisor is None else divisor))


_NUMBER = operand(value=lambda value: is_number(value) and value != 0)
_NUMBERS = {"factor": _NUMBER, "divisor": _NUMBER}


def _scores(q, k, a, b, factor, divisor):
    """What queries and keys have in common, scaled in the ways that people do it."""
    keys = any_of(lambda t: t.transpose(a, b), lambda t: t.mT)(k)
    return any_of(
        lambda t: torch.matmul(t, keys),
        lambda t: torch.matmul(t, keys) * factor,
        lambda t: torch.matmul(t, keys) / divisor,
        lambda t: torch.matmul(t * factor, keys),
        lambda t: torch.matmul(t / divisor, keys),
    )(q)


def _weighted(scores, v, p):
    """The mean of the values by the scores' softmax; dropout does nothing outside of training."""
    weights = torch.softmax(scores, -1)
    return torch.matmul(optional(lambda t: F.dropout(t, p, training=False))(weights), v)


_SAMPLES = (
    {
        "q": (2, 3, 5, 4), "k": (2, 3, 6, 4), "v": (2, 3, 6, 7), "mask": (5, 6),
        "a": -2, "b": -1, "factor": 0.3, "divisor": 2.5, "p": 0.1,
    },
    {
        "q": (1, 3, 5, 4), "k": (1, 3, 6, 4), "v": (1, 3, 6, 7), "mask": (3, 1, 6),
        "a": 3, "b": 2, "factor": 0.5, "divisor": 2, "p": 0.1,
    },
)  # fmt: skip


@rule(
    at="aten.matmul",
    where=[_is_attention, _mask_has_axes, _NUMBERS],
    exact=False,
    finite_only=True,
    benefit=5,
    samples=_SAMPLES,
)
def attention_by_hand(q, k, v, a, b, factor, divisor, mask, p):
    """Scores, scaled and masked by adding, made weights, and the mean of the values by them.

    The result is made contiguous, as the product by hand is. A mask that is known to be causal
    becomes `is_causal=True`. Left alone is a mask that may hide all keys from a query by -Inf,
    since that is NaN by hand.

    Rewrites:
        torch.softmax(q @ k.transpose(a, b) / divisor + mask, -1) @ v
            →  F.scaled_dot_product_attention(q, k, v, mask, scale=1 / divisor).contiguous()

    Source: Vaswani et al., Attention Is All You Need, equation 1.
    """
    scores = _scores(q, k, a, b, factor, divisor)
    masked = any_of(lambda t: t + mask, lambda t: t.add_(mask), lambda t: t)(scores)
    attended = F.scaled_dot_product_attention(
        q,
        k,
        v,
        computed(_unless_causal)(q, k, mask),
        is_causal=computed(_is_causal)(q, k, mask),
        scale=computed(_scale)(factor, divisor),
    )
    return _weighted(masked, v, p), attended.contiguous()


@rule(
    at="aten.matmul",
    where=[_is_attention, _mask_is_flat, _NUMBERS],
    exact=False,
    finite_only=True,
    benefit=5,
    samples=tuple({**sample, "mask": shape} for sample in _SAMPLES[:1] for shape in ((6,), ())),
)
def attention_with_a_bias_of_keys(q, k, v, a, b, factor, divisor, mask, p):
    """The same with a mask that has one number a key for all queries, as ALiBi has for a head.

    Rewrites:
        torch.softmax(q @ k.transpose(a, b) / divisor + mask, -1) @ v
            →  F.scaled_dot_product_attention(
                   q, k, v, mask.reshape(1, -1), scale=1 / divisor
               ).contiguous()

    Source: Press et al., Train Short, Test Long, section 3.
    """
    scores = _scores(q, k, a, b, factor, divisor)
    masked = any_of(lambda t: t + mask, lambda t: t.add_(mask))(scores)
    scale = computed(_scale)(factor, divisor)
    attended = F.scaled_dot_product_attention(q, k, v, mask.reshape(1, -1), scale=scale)
    return _weighted(masked, v, p), attended.contiguous()


def _number_of(value: Any) -> float | None:
    """Return the number that hides a score: a constant, or a tensor that holds one."""
    found = constant_value(value)
    if isinstance(found, torch.Tensor):
        return found.item() if found.numel() == 1 else None
    return float(found) if type(found) in (int, float) else None


def _hides(match: Match) -> bool | str:
    """Accept a choice among scores and a number, where adding does what choosing does.

    A query from which all keys are hidden gives all of them the same weight, by hand; added to its
    scores, the number does that too when it is so large that they are lost to rounding.
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
    is_lost = math.isfinite(number) and number * torch.finfo(q.dtype).eps < -2e6
    if _keeps_a_key(match[name], name) and (is_lost or "mask" not in match.bindings):
        return True if "mask" not in match.bindings else _wants_no_gradient(q, k)
    return (
        _wants_no_gradient(q, k)
        if is_lost
        else (f"all keys may be hidden from a query, and {number} then gives other weights by hand")
    )


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


def _is_future(q: Any, k: Any, drop: Any) -> bool:
    """Tell whether what is hidden is the future, and nothing else."""
    value = constant_value(drop)
    return isinstance(value, torch.Tensor) and _is_triangle(~value, type_of(q), type_of(k))


def _unless_future(q: Any, k: Any, drop: Any, added: Any) -> Any:
    return None if _is_future(q, k, drop) else added


def _attend(q, k, v, zero, drop, fill, factor, divisor):
    """Attention with hidden keys; of a mask that hides the future `is_causal` knows without one."""
    added = zero.masked_fill(drop, fill)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        computed(_unless_future)(q, k, drop, added),
        is_causal=computed(_is_future)(q, k, drop),
        scale=computed(_scale)(factor, divisor),
    ).contiguous()


_FILL = {"fill": -1e30}
_CHOICE = tuple({**sample, "keep": (5, 6), "drop": (1, 5, 6), **_FILL} for sample in _SAMPLES[:1])


@rule(
    at="aten.matmul",
    where=[every(_is_attention, _hides), {**_NUMBERS, "drop": operand(dtype=torch.bool)}],
    exact=False,
    finite_only=True,
    benefit=5,
    samples=_CHOICE,
)
def attention_with_hidden_keys(q, k, v, a, b, factor, divisor, drop, fill, p):
    """Attention that fills in a number where a query may not see a key.

    Left alone is a number that is not large enough to be lost, and -Inf, unless the mask is known
    to leave each query a key.

    Rewrites:
        torch.softmax((q @ k.transpose(a, b) / divisor).masked_fill(drop, fill), -1) @ v
            →  F.scaled_dot_product_attention(
                   q, k, v, q.new_zeros([1, 1]).masked_fill(drop, fill), scale=1 / divisor
               ).contiguous()
    """
    scores = _scores(q, k, a, b, factor, divisor)
    masked = any_of(lambda t: t.masked_fill(drop, fill), lambda t: t.masked_fill_(drop, fill))(
        scores
    )
    zero = q.new_zeros([1, 1])
    return _weighted(masked, v, p), _attend(q, k, v, zero, drop, fill, factor, divisor)


@rule(
    at="aten.matmul",
    where=[every(_is_attention, _hides), {**_NUMBERS, "keep": operand(dtype=torch.bool)}],
    exact=False,
    finite_only=True,
    benefit=5,
    samples=_CHOICE,
)
def attention_with_kept_keys(q, k, v, a, b, factor, divisor, keep, fill, p):
    """The same, with the choice the other way round, as GPT-2 wrote it.

    Rewrites:
        torch.softmax(torch.where(keep, q @ k.transpose(a, b) / divisor, fill), -1) @ v
            →  F.scaled_dot_product_attention(
                   q, k, v, q.new_zeros([1, 1]).masked_fill(torch.logical_not(keep), fill),
                   scale=1 / divisor,
               ).contiguous()
    """
    masked = torch.where(keep, _scores(q, k, a, b, factor, divisor), fill)
    zero = q.new_zeros([1, 1])
    attended = _attend(q, k, v, zero, torch.logical_not(keep), fill, factor, divisor)
    return _weighted(masked, v, p), attended


@rule(
    at="aten.matmul",
    where=[every(_is_attention, _hides), {**_NUMBERS, "keep": operand(dtype=torch.bool)}],
    exact=False,
    finite_only=True,
    benefit=5,
    samples=_CHOICE,
)
def masked_attention_with_kept_keys(q, k, v, a, b, factor, divisor, keep, fill, mask, p):
    """A choice among scores, and a mask added to that, as GPT-Neo has them.

    Rewrites:
        torch.softmax(torch.where(keep, q @ k.transpose(a, b) / divisor, fill) + mask, -1) @ v
            →  F.scaled_dot_product_attention(
                   q, k, v, q.new_zeros([1, 1]).masked_fill(torch.logical_not(keep), fill) + mask,
                   scale=1 / divisor,
               ).contiguous()
    """
    masked = torch.where(keep, _scores(q, k, a, b, factor, divisor), fill) + mask
    zero = q.new_zeros([1, 1])
    added = zero.masked_fill(torch.logical_not(keep), fill) + mask
    scale = computed(_scale)(factor, divisor)
    attended = F.scaled_dot_product_attention(q, k, v, added, scale=scale)
    return _weighted(masked, v, p), attended.contiguous()


def _repeats_heads(match: Match) -> bool | str:
    """Accept k and v with fewer heads than q, each repeated for as many heads in a row."""
    known = types_of(match, ("q", "k", "v"))
    if known is None or len(known) < 3:
        return UNKNOWN
    q, k, v = known
    if {len(one.shape) for one in known} != {4} or k.shape[1] != v.shape[1] or not k.shape[1]:
        return f"expected q, k and v of four axes, got q: {q}, k: {k} and v: {v}"
    times = q.shape[1] // k.shape[1]
    for one, name in ((k, "k"), (v, "v")):
        batch, heads, *rest = one.shape
        wanted = {
            f"wide_{name}": [batch, heads, times, *rest],
            f"full_{name}": [batch, heads * times, *rest],
            "times": times,
        }
        for capture, sizes in wanted.items():
            got = match.bindings.get(capture, sizes)
            if got != sizes or heads * times != q.shape[1]:
                return f"expected each head of {name}: {one} {times} times in a row, got {got}"
    return True


def _repeated(x, wide, full, times):
    """Each head of keys or values as often as queries have heads for it."""
    return any_of(
        lambda t: t[:, :, None, :, :].expand(wide).reshape(full),
        lambda t: t.unsqueeze(2).expand(wide).reshape(full),
        lambda t: torch.repeat_interleave(t, times, 1),
    )(x)


_GROUPED = {
    "q": (2, 4, 5, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, 8), "mask": (5, 6), "scale": 0.3,
    "causal": False, "times": 2, "wide_k": [2, 2, 2, 6, 8], "full_k": [2, 4, 6, 8],
    "wide_v": [2, 2, 2, 6, 8], "full_v": [2, 4, 6, 8],
}  # fmt: skip


@rule(
    at="aten.scaled_dot_product_attention",
    where=_repeats_heads,
    exact=False,
    finite_only=True,
    benefit=4,
    samples=(_GROUPED,),
)
def attention_with_repeated_heads(
    q, k, v, mask, causal, scale, times, wide_k, full_k, wide_v, full_v
):
    """Keys and values that several heads share: the operator repeats them without a copy.

    Rewrites:
        F.scaled_dot_product_attention(
            q, k[:, :, None, :, :].expand(wide_k).reshape(full_k),
            v[:, :, None, :, :].expand(wide_v).reshape(full_v), mask, 0.0, causal, scale=scale
        )
            →  F.scaled_dot_product_attention(
                   q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=True
               )

    Source: Ainslie et al., GQA, section 2.2.
    """
    keys = _repeated(k, wide_k, full_k, times)
    values = _repeated(v, wide_v, full_v, times)
    before = F.scaled_dot_product_attention(q, keys, values, mask, 0.0, causal, scale=scale)
    after = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=True)
    return before, after
