"""Attention that was spelled out by hand, back to the operator that does it in one go."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fxkit.ir.types import TensorType
from fxkit.patterns.conditions import UNKNOWN, is_number, types_of
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
    scores = (*q.shape[:-1], k.shape[-2])
    if mask.dtype != q.dtype or len(mask.shape) > len(scores):
        return f"expected a mask of {q}'s dtype for scores {list(scores)}, got {mask}"
    sizes = zip(mask.shape[::-1], scores[::-1], strict=False)
    fits = all(size in (1, score) for size, score in sizes)
    return True if fits else f"expected a mask for scores {list(scores)}, got {mask}"


def _scale(factor: Any, divisor: Any) -> float:
    """Return what the scores are multiplied by."""
    return float((1 if factor is None else factor) / (1 if divisor is None else divisor))


_NUMBER = operand(value=lambda value: is_number(value) and value != 0)


# A row whose mask is all -Inf is NaN by hand; the kernels differ in what they give there.
@rule(
    where=[_is_attention, {"factor": _NUMBER, "divisor": _NUMBER}],
    exact=False,
    finite_only=True,
    benefit=5,
    samples=(
        {
            "q": (2, 3, 5, 4), "k": (2, 3, 6, 4), "v": (2, 3, 6, 7), "mask": (5, 6),
            "a": -2, "b": -1, "factor": 0.3, "divisor": 2.5, "p": 0.1,
        },
        {
            "q": (1, 3, 5, 4), "k": (1, 3, 6, 4), "v": (1, 3, 6, 7), "mask": (3, 1, 6),
            "a": 3, "b": 2, "factor": 0.5, "divisor": 2, "p": 0.1,
        },
    ),
)  # fmt: skip
def attention_by_hand(q, k, v, a, b, factor, divisor, mask, p):
    """Scores, scaled and masked by adding, made weights, and the mean of the values by them.

    The result is made contiguous, as the product by hand is.

    Rewrites:
        torch.softmax(q @ k.transpose(a, b) / divisor + mask, -1) @ v
            →  F.scaled_dot_product_attention(q, k, v, mask, scale=1 / divisor).contiguous()

    Source: Vaswani et al., Attention Is All You Need, equation 1.
    """
    keys = any_of(lambda t: t.transpose(a, b), lambda t: t.mT)(k)
    scores = any_of(
        lambda t: torch.matmul(t, keys),
        lambda t: torch.matmul(t, keys) * factor,
        lambda t: torch.matmul(t, keys) / divisor,
        lambda t: torch.matmul(t * factor, keys),
        lambda t: torch.matmul(t / divisor, keys),
    )(q)
    masked = optional(lambda t: t + mask)(scores)
    weights = optional(lambda t: F.dropout(t, p, training=False))(torch.softmax(masked, -1))
    scale = computed(_scale)(factor, divisor)
    attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return torch.matmul(weights, v), attended.contiguous()
