"""Attention that was spelled out by hand, back to the operator that does it in one go."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fxkit.patterns.conditions import UNKNOWN, every, types_of
from fxkit.patterns.language import any_of, computed, operand, optional
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import rule
from fxkit.patterns.rules.attention_conditions import (
    fill_for,
    hides,
    hides_last,
    is_attention,
    is_attention_less_a_mask,
    is_attention_with_two_masks,
    is_causal,
    is_future,
    mask_has_axes,
    mask_is_flat,
    scale_of,
    unless_causal,
    unless_future,
)

# Products by hand are rounded otherwise, and hide keys by numbers that are lost in the weights.
_attention_rule = functools.partial(
    rule, at="aten.matmul", exact=False, finite_only=True, benefit=5
)


def _scores(q, k, a, b, factor, divisor):
    """What queries and keys have in common, scaled in the ways that people do it."""
    keys = any_of(lambda t: t.transpose(a, b), lambda t: t.mT)(k)
    return any_of(
        lambda t: torch.matmul(t, keys),
        lambda t: torch.matmul(t, keys) * factor,
        lambda t: torch.matmul(t, keys) / divisor,
        lambda t: torch.matmul(t * factor, keys),
        lambda t: torch.matmul(t / divisor, keys),
        lambda t: torch.matmul(t, keys * factor),
        lambda t: torch.matmul(t, keys / divisor),
    )(q)


def _weighted(scores, v, p):
    """The mean of the values by the scores' softmax; dropout does nothing outside of training."""
    weights = torch.softmax(scores, -1)
    return torch.matmul(optional(lambda t: F.dropout(t, p, training=False))(weights), v)


def _attended(q, k, v, mask, factor, divisor):
    """Attention by the operator, made contiguous, as the product by hand is."""
    scale = computed(scale_of)(factor, divisor)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).contiguous()


def _filled(scores, drop, fill):
    """Scores with a number where keys are hidden, in the ways that people fill it in."""
    return any_of(
        lambda t: t.masked_fill(drop, fill),
        lambda t: t.masked_fill_(drop, fill),
        lambda t: torch.where(drop, fill, t),
    )(scores)


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


@_attention_rule(where=every(is_attention, mask_has_axes), samples=_SAMPLES)
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
        computed(unless_causal)(q, k, mask),
        is_causal=computed(is_causal)(q, k, mask),
        scale=computed(scale_of)(factor, divisor),
    )
    return _weighted(masked, v, p), attended.contiguous()


@_attention_rule(
    where=every(is_attention, mask_is_flat),
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
    return _weighted(masked, v, p), _attended(q, k, v, mask.reshape(1, -1), factor, divisor)


def _attend(q, k, v, zero, drop, fill, factor, divisor):
    """Attention with hidden keys; of a mask that hides the future `is_causal` knows without one."""
    added = zero.masked_fill(drop, computed(fill_for)(q, fill))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        computed(unless_future)(q, k, drop, added),
        is_causal=computed(is_future)(q, k, drop),
        scale=computed(scale_of)(factor, divisor),
    ).contiguous()


_FILL = {"fill": -1e30}
_CHOICE = tuple({**sample, "keep": (5, 6), "drop": (1, 5, 6), **_FILL} for sample in _SAMPLES[:1])


@_attention_rule(
    where=[every(is_attention, hides), {"drop": operand(dtype=torch.bool)}], samples=_CHOICE
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
    masked = _filled(_scores(q, k, a, b, factor, divisor), drop, fill)
    zero = q.new_zeros([1, 1])
    return _weighted(masked, v, p), _attend(q, k, v, zero, drop, fill, factor, divisor)


@_attention_rule(where=is_attention_less_a_mask, samples=_SAMPLES[:1])
def attention_less_a_mask(q, k, v, a, b, factor, divisor, mask, p):
    """A mask that is subtracted, as `10000 * (1 - kept)`.

    Rewrites:
        torch.softmax(q @ k.transpose(a, b) / divisor - mask, -1) @ v
            →  F.scaled_dot_product_attention(
                   q, k, v, torch.neg(mask), scale=1 / divisor
               ).contiguous()
    """
    masked = _scores(q, k, a, b, factor, divisor) - mask
    return _weighted(masked, v, p), _attended(q, k, v, torch.neg(mask), factor, divisor)


@_attention_rule(
    where=is_attention_with_two_masks,
    samples=tuple({**sample, "other": (3, 1, 6)} for sample in _SAMPLES[:1]),
)
def attention_with_two_masks(q, k, v, a, b, factor, divisor, mask, other, p):
    """Two masks that are added one after the other, such as ALiBi's and a causal one.

    Rewrites:
        torch.softmax(q @ k.transpose(a, b) / divisor + mask + other, -1) @ v
            →  F.scaled_dot_product_attention(q, k, v, mask + other, scale=1 / divisor).contiguous()
    """
    masked = _scores(q, k, a, b, factor, divisor) + mask + other
    return _weighted(masked, v, p), _attended(q, k, v, mask + other, factor, divisor)


@_attention_rule(
    where=[every(is_attention, mask_has_axes, hides_last), {"drop": operand(dtype=torch.bool)}],
    samples=_CHOICE,
)
def masked_attention_with_hidden_keys(q, k, v, a, b, factor, divisor, mask, drop, fill, p):
    """A bias that is added to scores, and then keys that are hidden, as MPT has them.

    Rewrites:
        torch.softmax((q @ k.transpose(a, b) / divisor + mask).masked_fill(drop, fill), -1) @ v
            →  F.scaled_dot_product_attention(
                   q, k, v, mask.masked_fill(drop, fill), scale=1 / divisor
               ).contiguous()
    """
    masked = _filled(_scores(q, k, a, b, factor, divisor) + mask, drop, fill)
    added = mask.masked_fill(drop, computed(fill_for)(q, fill))
    return _weighted(masked, v, p), _attended(q, k, v, added, factor, divisor)


@_attention_rule(
    where=[every(is_attention, hides), {"keep": operand(dtype=torch.bool)}], samples=_CHOICE
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


@_attention_rule(
    where=[every(is_attention, hides), {"keep": operand(dtype=torch.bool)}], samples=_CHOICE
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
    hidden = torch.logical_not(keep)
    added = zero.masked_fill(hidden, computed(fill_for)(q, fill)) + mask
    return _weighted(masked, v, p), _attended(q, k, v, added, factor, divisor)


def _repeats_heads(match: Match) -> bool | str:
    """Accept k and v with fewer heads than q, each repeated for as many heads in a row."""
    known = types_of(match, ("q", "k", "v"))
    if known is None or len(known) < 3:
        return UNKNOWN
    q, k, v = known
    if {len(one.shape) for one in known} != {4} or k.shape[1] != v.shape[1] or k.shape[1] == 0:
        return f"expected q, k and v of four axes, got q: {q}, k: {k} and v: {v}"
    if not isinstance(q.shape[1], int) or not isinstance(k.shape[1], int):
        return f"expected numbers of heads that are known, got q: {q} and k: {k}"
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
