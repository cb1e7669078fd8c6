"""Products of matrices that are a linear layer."""

from __future__ import annotations

import torch.nn.functional as F

from fxkit.ir.types import TensorType
from fxkit.patterns.matching import Match
from fxkit.patterns.rewriting import rule


def _is_linear(match: Match) -> bool | str:
    weight, bias = match.type("w"), match.type("b")
    if not isinstance(weight, TensorType) or not isinstance(bias, TensorType):
        return "the types are not known; call propagate_types first"
    if len(weight.shape) != 2 or len(bias.shape) != 1 or bias.shape[0] != weight.shape[0]:
        return f"expected w: [out, in] and b: [out], got {weight} and {bias}"
    if bias.dtype != weight.dtype:
        return f"the bias is {bias} and the weight {weight}"
    return True


@rule(where=_is_linear, exact=False, samples=({"x": (2, 3, 4), "w": (5, 4), "b": (5,)},))
def linear_by_matmul(x, w, b):
    """A linear layer written as a product and a sum.

    Rewrites:
        x @ w.t() + b  →  F.linear(x, w, b)
    """
    return x @ w.t() + b, F.linear(x, w, b)
