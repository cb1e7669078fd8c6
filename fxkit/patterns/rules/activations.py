"""Activations that were spelled out by hand, back to the operator they are."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fxkit.ir.types import TensorType
from fxkit.patterns.matching import Match
from fxkit.patterns.rewriting import rule


def _is_floating(match: Match) -> bool | str:
    known = match.type("x")
    if not isinstance(known, TensorType):
        return "the types are not known; call propagate_types first"
    return True if known.dtype.is_floating_point else f"{known} is not floating point"


# torch's float32 kernel of gelu gives NaN at +Inf on some CPUs, where the long form gives +Inf.
@rule(where=_is_floating, exact=False, finite_only=True, benefit=3)
def gelu_by_erf(x):
    """The exact GELU, as many models write it.

    Rewrites:
        x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))  →  F.gelu(x)

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, equation 1.
    """
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), F.gelu(x)


@rule(where=_is_floating, exact=False, benefit=3)
def gelu_by_tanh(x):
    """The tanh approximation of GELU, as GPT-2 writes it.

    Rewrites:
        0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
            →  F.gelu(x, approximate="tanh")

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, section 2.
    """
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner)), F.gelu(x, approximate="tanh")


@rule(where=_is_floating, exact=False, benefit=2)
def silu_by_sigmoid(x):
    """SiLU, also called swish.

    Rewrites:
        x * torch.sigmoid(x)  →  F.silu(x)
    """
    return x * torch.sigmoid(x), F.silu(x)


@rule(where=_is_floating, exact=False, benefit=2)
def sigmoid_by_exp(x):
    """The logistic function written out.

    Rewrites:
        1 / (1 + torch.exp(-x))  →  torch.sigmoid(x)
    """
    return 1 / (1 + torch.exp(-x)), torch.sigmoid(x)
