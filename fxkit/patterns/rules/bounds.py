"""Bounds that follow one another, exactly: NaN passes all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxkit.patterns.conditions import floating, is_number, is_zero, no_gradient
from fxkit.patterns.language import any_of, computed, operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import rule

_BOUNDS = {"low": operand(value=is_number), "high": operand(value=is_number)}


def _from_below(x, low):
    return any_of(lambda v, b: torch.clamp(v, min=b), torch.clamp_min)(x, low)


def _from_above(x, high):
    return any_of(lambda v, b: torch.clamp(v, max=b), torch.clamp_max)(x, high)


def _is_range(match: Match) -> bool | str:
    low, high = match["low"], match["high"]
    return True if low <= high else f"expected a lower bound first, got {low} and {high}"


@rule(at="aten.relu")
def relu_of_relu(x):
    """A second relu has nothing left to cut.

    Rewrites:
        torch.relu(torch.relu(x))  →  torch.relu(x)
    """
    return torch.relu(torch.relu(x)), torch.relu(x)


@rule(at="aten.relu")
def relu_of_positive(x):
    """What is never negative has nothing to cut.

    Rewrites:
        torch.relu(torch.sigmoid(x))  →  torch.sigmoid(x)
    """
    positive = any_of(torch.sigmoid, torch.exp)(x)
    return torch.relu(positive), positive


# Where x is at the bound, clamp passes the gradient and relu does not.
@rule(at=("aten.clamp", "aten.clamp_min"),
      where=[floating("x"), no_gradient("x"), {"zero": operand(value=is_zero)}],
      samples=({"zero": 0}, {"zero": 0.0}))  # fmt: skip
def relu_by_clamp(x, zero):
    """A lower bound of zero is a relu, which kernels take as their epilogue.

    Rewrites:
        torch.clamp(x, min=zero)  →  torch.relu(x)
    """
    return _from_below(x, zero), torch.relu(x)


@rule(
    at=("aten.clamp", "aten.clamp_max"),
    where=[floating("x"), _BOUNDS],
    samples=({"low": -0.5, "high": 0.5}, {"low": 1, "high": -1}),
)
def clamp_from_below_then_above(x, low, high):
    """Two bounds are one clamp; where they cross, the upper one wins in both.

    Rewrites:
        torch.clamp(torch.clamp(x, min=low), max=high)  →  torch.clamp(x, low, high)
    """
    return _from_above(_from_below(x, low), high), torch.clamp(x, low, high)


@rule(
    at=("aten.clamp", "aten.clamp_min"),
    where=[floating("x"), _is_range, _BOUNDS],
    samples=({"low": -0.5, "high": 0.5},),
)
def clamp_from_above_then_below(x, low, high):
    """Two bounds are one clamp, unless they cross.

    Rewrites:
        torch.clamp(torch.clamp(x, max=high), min=low)  →  torch.clamp(x, low, high)
    """
    return _from_below(_from_above(x, high), low), torch.clamp(x, low, high)


def _is_relu_range(match: Match) -> bool | str:
    return True if match["high"] >= 0 else f"expected a bound above zero, got {match['high']}"


# Where x is zero, clamp passes the gradient and relu does not.
@rule(at=("aten.clamp", "aten.clamp_max"),
      where=[floating("x"), no_gradient("x"), _is_relu_range, {"high": _BOUNDS["high"]}],
      samples=({"high": 0.5},))  # fmt: skip
def clamp_of_relu(x, high):
    """An upper bound on a relu is one clamp.

    Rewrites:
        torch.clamp(torch.relu(x), max=high)  →  torch.clamp(x, 0, high)
    """
    return _from_above(F.relu(x), high), torch.clamp(x, 0, high)


_FOUR = {name: operand(value=is_number) for name in ("low", "high", "floor", "ceiling")}


def _overlap(match: Match) -> bool | str:
    """Bounds that do not overlap leave a constant, whose gradient at the bound differs."""
    low, high, floor, ceiling = (match[name] for name in _FOUR)
    fits = low <= high and floor <= ceiling and max(low, floor) <= min(high, ceiling)
    return True if fits else f"expected ranges that overlap, got {match}"


@rule(
    at="aten.clamp",
    where=[floating("x"), _overlap, _FOUR],
    samples=(
        {"low": -1, "high": 0.5, "floor": -0.5, "ceiling": 2.0},
        {"low": -0.5, "high": 2, "floor": -1.0, "ceiling": 0.5},
    ),
)
def clamp_of_clamp(x, low, high, floor, ceiling):
    """Two clamps are one, to the range that they have in common.

    Rewrites:
        torch.clamp(torch.clamp(x, low, high), floor, ceiling)
            →  torch.clamp(x, max(low, floor), min(high, ceiling))
    """
    return (
        torch.clamp(torch.clamp(x, low, high), floor, ceiling),
        torch.clamp(x, computed(max)(low, floor), computed(min)(high, ceiling)),
    )
