"""Attention with batch and heads in one axis, by products of batches of matrices."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from fxkit.ir.types import type_of
from fxkit.patterns.conditions import every
from fxkit.patterns.language import any_of, computed, operand, optional
from fxkit.patterns.rewriting import rule
from fxkit.patterns.rules.attention_conditions import (
    fill_for,
    hides,
    is_attention_of_matrices,
    scale_of,
)

_attention_rule = functools.partial(
    rule, at=("aten.bmm", "aten.matmul"), exact=False, finite_only=True, benefit=5
)


def _by_hand(product, masked):
    """Attention out of products of one kind, given what is done to the scores."""

    def attended(q, k, v, a, b, factor, divisor, p):
        keys = k.transpose(a, b)
        scores = any_of(
            lambda t: product(t, keys),
            lambda t: product(t, keys) * factor,
            lambda t: product(t, keys) / divisor,
            lambda t: product(t * factor, keys),
        )(q)
        weights = torch.softmax(masked(scores), -1)
        return product(optional(lambda t: F.dropout(t, p, training=False))(weights), v)

    return attended


def _attention(masked, *operands):
    return any_of(_by_hand(torch.bmm, masked), _by_hand(torch.matmul, masked))(*operands)


def _with_one_head(q, k, v):
    return q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)


def _attended(operands, factor, divisor, *mask):
    """Attention by the operator, of queries, keys and values with one head."""
    scale = computed(scale_of)(factor, divisor)
    attended = F.scaled_dot_product_attention(*operands, *mask, scale=scale)
    return attended.squeeze(1).contiguous()


def _with_a_head(mask: Any) -> list[Any]:
    """Return the shape of a mask of matrices that has an axis more, for the one head."""
    shape = (1, 1, 1, *type_of(mask).shape)[-3:]
    return [shape[0], 1, *shape[1:]]


_MATRICES = {
    "q": (2, 5, 4), "k": (2, 6, 4), "v": (2, 6, 7), "mask": (5, 6), "a": 1, "b": 2,
    "factor": 0.3, "divisor": 2.5, "p": 0.1,
}  # fmt: skip


@_attention_rule(where=is_attention_of_matrices, samples=(_MATRICES,))
def attention_of_matrices(q, k, v, a, b, factor, divisor, p):
    """Attention with batch and heads in one axis.

    Rewrites:
        torch.bmm(torch.softmax(torch.bmm(q, k.transpose(a, b)) / divisor, -1), v)
            →  F.scaled_dot_product_attention(
                   q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), scale=1 / divisor
               ).squeeze(1).contiguous()
    """
    before = _attention(lambda t: t, q, k, v, a, b, factor, divisor, p)
    return before, _attended(_with_one_head(q, k, v), factor, divisor)


@_attention_rule(
    where=is_attention_of_matrices,
    samples=(_MATRICES, {**_MATRICES, "mask": (2, 1, 6)}, {**_MATRICES, "mask": (6,)}),
)
def masked_attention_of_matrices(q, k, v, a, b, factor, divisor, mask, p):
    """The same with a mask that is added.

    Rewrites:
        torch.bmm(torch.softmax(torch.bmm(q, k.transpose(a, b)) / divisor + mask, -1), v)
            →  F.scaled_dot_product_attention(
                   q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), mask.reshape([1, 1, 5, 6]),
                   scale=1 / divisor
               ).squeeze(1).contiguous()
    """
    operands = _with_one_head(q, k, v)
    added = mask.reshape(computed(_with_a_head)(mask))
    masked = any_of(lambda t: t + mask, lambda t: t.add_(mask))
    before = _attention(masked, q, k, v, a, b, factor, divisor, p)
    return before, _attended(operands, factor, divisor, added)


@_attention_rule(
    where=[every(is_attention_of_matrices, hides), {"drop": operand(dtype=torch.bool)}],
    samples=({**_MATRICES, "drop": (2, 1, 6), "fill": -1e30},),
)
def attention_of_matrices_with_hidden_keys(q, k, v, a, b, factor, divisor, drop, fill, p):
    """The same with a number filled in where a query may not see a key.

    Rewrites:
        torch.bmm(
            torch.softmax((torch.bmm(q, k.transpose(a, b)) / divisor).masked_fill(drop, fill), -1),
            v,
        )
            →  F.scaled_dot_product_attention(
                   q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1),
                   q.new_zeros([1, 1, 1, 1]).masked_fill(drop.reshape([2, 1, 1, 6]), fill),
                   scale=1 / divisor
               ).squeeze(1).contiguous()
    """
    operands = _with_one_head(q, k, v)
    zero = q.new_zeros([1, 1, 1, 1])
    hidden = drop.reshape(computed(_with_a_head)(drop))
    added = zero.masked_fill(hidden, computed(fill_for)(q, fill))
    masked = any_of(lambda t: t.masked_fill(drop, fill), lambda t: t.masked_fill_(drop, fill))
    before = _attention(masked, q, k, v, a, b, factor, divisor, p)
    return before, _attended(operands, factor, divisor, added)
