"""Which passes over a row are printed in lanes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fxkit.lower.loops.loop_ir import Access, Instruction, Kernel
from fxkit.lower.loops.schedule import Pass, Schedule

# How many lanes there are at most: rows of a multiple of these need no look at their ends.
MOST = 16

# What takes fewer instructions there.
_GAINING = frozenset("exp sigmoid tanh normal_cdf expm1".split())

# The same for operands near zero; others are computed one by one.
_NEAR = frozenset({"sin", "cos"})

# What can stand in such a pass.
_FUNCTIONS = _GAINING | frozenset(
    "add sub mul div neg abs sqrt max min fma select log log1p".split()
)
_COMPARISONS = frozenset("lt le gt ge eq ne".split())
_LOGIC = frozenset("and or xor not".split())

# Functions of float32 whose names the compiler has for single numbers only.
OWN_NAMES = frozenset({"abs", "sqrt"})


def gains_in_lanes(
    kernel: Kernel,
    plan: Schedule,
    one: Pass,
    element: torch.dtype = torch.float32,
    *,
    is_near: bool = False,
) -> bool:
    """Tell whether a pass can be printed in lanes and takes fewer instructions there.

    Args:
        kernel: The kernel.
        plan: Its passes.
        one: One of them.
        element: What memory holds of all values that vary along the row.
        is_near: Whether it is printed for operands near zero.
    """
    gaining = _GAINING | _NEAR if is_near else _GAINING
    called = [kernel.body[p] for p in one.values if kernel.body[p].op in gaining]
    return any(map(_is_float, called)) and stands_in_lanes(
        kernel, plan, one, element, is_near=is_near
    )


def stands_in_lanes(
    kernel: Kernel,
    plan: Schedule,
    one: Pass,
    element: torch.dtype = torch.float32,
    *,
    is_near: bool = False,
) -> bool:
    """Tell whether a pass can be printed in lanes; see `gains_in_lanes`."""
    functions = _FUNCTIONS | _NEAR if is_near else _FUNCTIONS
    body = kernel.body
    computed = [p for p in one.values if plan.wide[p]]
    kept = {*one.buffered, *one.keeps, *one.reductions}
    return (
        all(_can_stand(kernel, body[p], element, functions) for p in computed)
        and all(_is_float(body[p]) for p in kept)
        and all(body[p].op == "reduce_add" for p in one.reductions)
        and all(
            _is_float(body[kernel.stores[p].value])
            and _is_along(kernel, kernel.stores[p].access, element)
            for p in one.stores
            if not kernel.stores[p].is_sum
        )
        and all(_is_float(body[kernel.stores[p].value]) for p in one.stores)
    )


def _can_stand(
    kernel: Kernel, instruction: Instruction, element: torch.dtype, functions: frozenset[str]
) -> bool:
    op = instruction.op
    operands = [kernel.body[o].dtype for o in instruction.operands]
    if op == "load":
        is_plain = not instruction.operands and instruction.guard is None
        return is_plain and _is_along(kernel, instruction.detail, element)
    if op == "cast":
        return _is_float(instruction) and operands == [torch.bool]
    if op == "round":
        return _is_float(instruction) and instruction.detail == torch.bfloat16
    if op in _COMPARISONS:
        return all(dtype == torch.float32 for dtype in operands)
    if op in _LOGIC:
        return instruction.dtype == torch.bool
    return op in functions and _is_float(instruction) and _are_floats(operands[op == "select" :])


def _are_floats(dtypes: Iterable[torch.dtype]) -> bool:
    return all(dtype == torch.float32 for dtype in dtypes)


def _is_float(instruction: Instruction) -> bool:
    return instruction.dtype == torch.float32


def _is_along(kernel: Kernel, access: Access, element: torch.dtype) -> bool:
    """Tell whether an access walks memory in order."""
    is_next = access.strides[-1:] == (1,) and not access.scales
    return is_next and kernel.buffers[access.buffer].dtype == element
