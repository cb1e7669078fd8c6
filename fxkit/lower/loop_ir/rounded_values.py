"""Which values are such as a dtype of memory has, or become so where they are stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxkit.lower.loop_ir.loop_ir import Kernel

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


def unrounded(kernel: Kernel, store: int) -> int:
    """Return the value that a store writes, without a rounding that writing it does anyway."""
    value = kernel.stores[store].value
    if kernel.stores[store].is_sum:
        return value
    dtype = kernel.buffers[kernel.stores[store].access.buffer].dtype
    instruction = kernel.body[value]
    is_rounded = instruction.op == "round" and instruction.detail == dtype
    return instruction.operands[0] if is_rounded else value
