"""Which operations, of values that a dtype of memory has, give such values again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

# Operations whose result is one of their operands, but for the sign.
_CHOOSING = frozenset({"abs", "neg", "max", "min", "select", "reduce_max", "reduce_min"})


def holds(op: str, constants: Sequence[Any], dtype: torch.dtype) -> bool:
    """Tell whether an operation's result needs no rounding where its operands need none.

    Args:
        op: The operation.
        constants: The numbers among its operands.
        dtype: What memory holds. bfloat16 overflows where float32 does, and what it has times 1, 2,
            4, … it has too.
    """
    if op in _CHOOSING:
        return True
    if op != "mul" or dtype != torch.bfloat16:
        return False
    return any(type(n) is float and abs(n) >= 1 and math.frexp(abs(n))[0] == 0.5 for n in constants)
