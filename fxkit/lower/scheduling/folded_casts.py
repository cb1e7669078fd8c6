"""Casts to integers that the compiler could fold: to an out-of-range constant, or a truncation.

A cast of what is out of range is undefined in C++: folded at compile time it gives another number
than the machine's instruction, which eager runs. Constants, and what is computed from constants
alone, are affected. A truncation keeps the sign of zero, which an integer has none of.
"""

from __future__ import annotations

from typing import Any

import torch

from fxkit.lower.loop_ir.loop_ir import Instruction, Kernel
from fxkit.lower.loop_ir.runtime_parameters import is_runtime

# From here on there is no such integer of 32 bits, by way of which the narrow ones are made.
_FAR = 2.0**31

_CHOICES = frozenset({"select", "max", "min"})
_EXTREMA = frozenset({"reduce_max", "reduce_min", "scan_max", "scan_min"})
# What makes no number larger.
_ROUNDING = frozenset({"neg", "abs", "floor", "ceil", "trunc", "rint", "round", "cast", "check"})


def far_numbers(kernel: Kernel) -> list[bool]:
    """Return for each value of a kernel whether the compiler may know it, and it may be far."""
    known: list[bool] = []
    far: list[bool] = []
    for instruction in kernel.body:
        chosen = _chosen_from(instruction, kernel)
        known.append(_is_known(instruction, [known[o] for o in chosen]))
        far.append(_is_far(instruction, [far[o] for o in chosen], known[-1]))
    return far


def is_truncation(kernel: Kernel, position: int) -> bool:
    """Tell whether a value is a float of an integer of a float.

    For two conversions g++ puts a truncation, whose result has the sign of its operand where it is
    zero; the zero that an integer becomes has none. `fx_unsigned_zero` takes it away again.
    """
    value = kernel.body[position]
    if value.op != "cast" or not value.dtype.is_floating_point:
        return False
    integer = kernel.body[value.operands[0]]
    is_whole = not integer.dtype.is_floating_point and integer.dtype != torch.bool
    if integer.op != "cast" or not is_whole:
        return False
    return kernel.body[integer.operands[0]].dtype.is_floating_point


def _chosen_from(instruction: Instruction, kernel: Kernel) -> tuple[int, ...]:
    """Return the values that one is made of: of a choice, what it may be, or be equal to."""
    if instruction.op != "select":
        return instruction.operands
    condition, *sides = instruction.operands
    compared = kernel.body[condition]
    return (*sides, *(compared.operands if compared.op in ("eq", "ne") else ()))


def _is_known(instruction: Instruction, known: list[bool]) -> bool:
    match instruction.op:
        case "const":
            return not is_runtime(instruction.detail.value)
        case "load":
            return instruction.detail.otherwise is not None
        case "index":
            return False
        case op if op in _EXTREMA:
            return True
    if instruction.op in _CHOICES:
        return any(known)
    return bool(known) and all(known)


def _is_far(instruction: Instruction, far: list[bool], is_known: bool) -> bool:
    match instruction.op:
        case "const":
            return _is_far_number(instruction.detail.value)
        case "load":
            otherwise = instruction.detail.otherwise
            return otherwise is not None and _is_far_number(otherwise.value)
        case op if op in _CHOICES or op in _ROUNDING:
            return any(far)
        case "index":
            return False
    return is_known or any(far)


def _is_far_number(value: Any) -> bool:
    return not is_runtime(value) and not abs(value) < _FAR
