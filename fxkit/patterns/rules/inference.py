"""What does nothing outside of training."""

from __future__ import annotations

import torch.nn.functional as F

from fxkit.patterns.conditions import contiguous, floating, is_number
from fxkit.patterns.language import any_of, computed, operand
from fxkit.patterns.rewriting import rule


@rule(
    at=("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout")
)
def dropout_in_eval(x, p):
    """Dropout of every kind returns its operand itself outside of training.

    Rewrites:
        F.dropout(x, p, training=False)  →  x
    """
    dropped = any_of(
        lambda v: F.dropout(v, p, training=False),
        lambda v: F.dropout2d(v, p, training=False),
        lambda v: F.alpha_dropout(v, p, training=False),
        lambda v: F.feature_alpha_dropout(v, p, training=False),
    )
    return dropped(x), x


# torch's kernel of rrelu makes its result contiguous.
@rule(
    at="aten.rrelu",
    where=[
        floating("x"),
        contiguous("x"),
        {"low": operand(value=is_number), "high": operand(value=is_number)},
    ],
    samples=({"low": 0.125, "high": 0.375},),
)
def random_relu_in_eval(x, low, high):
    """Outside of training the random slope is the middle of its range.

    Rewrites:
        F.rrelu(x, low, high, training=False)  →  F.leaky_relu(x, (low + high) / 2)
    """
    slope = computed(lambda low, high: (low + high) / 2)(low, high)
    return F.rrelu(x, low, high, training=False), F.leaky_relu(x, slope)
