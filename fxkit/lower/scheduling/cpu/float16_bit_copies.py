"""float16 copies are done bitwise: sweeps that only move elements convert nothing.

Negation and `abs` flip or clear the sign bit on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import round_number
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.row_sweeps import RowSweep

# What an operation does to the bit that is the sign.
SIGNS = {"neg": "^ 0x8000", "abs": "& 0x7fff"}


def only_moves(kernel: Kernel, one: RowSweep) -> bool:
    """Tell whether all that a sweep does is to store halves that it has read, or constants.

    They may have changed sign.
    """
    if one.reductions or one.keeps or not one.stores:
        return False
    if any(kernel.body[p].is_scan or p in one.buffered for p in one.values):
        return False
    stores = [kernel.stores[p] for p in one.stores]
    return all(
        kernel.buffers[store.access.buffer].dtype == torch.float16
        and not store.is_sum
        and _is_moved(kernel, store.value)
        for store in stores
    )


def _is_moved(kernel: Kernel, position: int) -> bool:
    instruction = kernel.body[position]
    if instruction.op == "load":
        access = instruction.detail
        is_half = kernel.buffers[access.buffer].dtype == torch.float16
        return is_half and (access.otherwise is None or _is_half(access.otherwise.value))
    if instruction.op == "const":
        return _is_half(instruction.detail.value)
    if instruction.op == "round":
        is_half = instruction.detail == torch.float16
        return is_half and _is_moved(kernel, instruction.operands[0])
    if instruction.op in SIGNS:
        return _is_moved(kernel, instruction.operands[0])
    return instruction.op == "select" and all(
        _is_moved(kernel, p) for p in instruction.operands[1:]
    )


def deciding_values(kernel: Kernel, one: RowSweep) -> list[int]:
    """Return the values of a sweep that say what is moved, in order, and its checks."""
    found = {p for p in one.values if kernel.body[p].op == "check"}
    for store in one.stores:
        found.update(_deciding(kernel, kernel.stores[store].value))
    open_ = list(found)
    while open_:
        for operand in kernel.body[open_.pop()].operands:
            if operand not in found:
                found.add(operand)
                open_.append(operand)
    return sorted(found.intersection(one.values))


def _deciding(kernel: Kernel, position: int) -> Iterator[int]:
    instruction = kernel.body[position]
    if instruction.op == "load":
        yield from instruction.operands
    elif instruction.op == "round" or instruction.op in SIGNS:
        yield from _deciding(kernel, instruction.operands[0])
    elif instruction.op == "select":
        condition, first, second = instruction.operands
        yield condition
        yield from _deciding(kernel, first)
        yield from _deciding(kernel, second)


def _is_half(number: Number) -> bool:
    if type(number) is not float:
        return False
    return math.isnan(number) or number == round_number(number, torch.float16)
