"""The monoids of reductions: how two results are folded into one, and what they start from."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.minimum,
    "or": torch.maximum,
    "logaddexp": torch.logaddexp,
}


def neutral_element(monoid: str, dtype: torch.dtype) -> bool | int | float:
    """Return the number that changes nothing when it is folded in."""
    if monoid in ("add", "mul"):
        return int(monoid == "mul")
    if monoid == "logaddexp":
        return -math.inf
    is_least = monoid in ("min", "and")
    if dtype == torch.bool:
        return is_least
    if dtype.is_floating_point:
        return math.inf if is_least else -math.inf
    limits = torch.iinfo(dtype)
    return limits.max if is_least else limits.min
