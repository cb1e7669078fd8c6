"""Which row sweeps are printed with explicit vectors instead of `omp simd`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel, Store
from fxkit.lower.loop_ir.rounded_values import unrounded
from fxkit.lower.loop_ir.scalar_functions import named
from fxkit.lower.scheduling.index_intervals import IndexInterval, outcome
from fxkit.lower.scheduling.index_intervals import computed as computed_along
from fxkit.lower.scheduling.nan_propagation import nan_insensitive
from fxkit.lower.scheduling.row_sweeps import RowSweep, SweepPlan

# How many lanes there are at most: rows of a multiple of these need no look at their ends.
MOST = 16

# What memory holds of values that loops compute as they are: elements of float16 are converted
# apart from the loops.
FLOATS = (torch.float32, torch.float16)

# What takes fewer instructions there, besides rounding to bfloat16.
_GAINING = named(lambda f: f.in_lanes == "gains")

# The same for operands near zero; others are computed one by one.
_NEAR = named(lambda f: f.in_lanes == "near")

# What can stand in such a sweep.
_FUNCTIONS = named(lambda f: f.in_lanes in ("gains", "has"))
_COMPARISONS = frozenset("lt le gt ge eq ne".split())
_LOGIC = frozenset("and or xor not".split())

# Functions of float32 whose names the compiler has for single numbers only.
OWN_NAMES = frozenset({"abs", "sqrt"})


def gains_in_lanes(
    kernel: Kernel,
    plan: SweepPlan,
    one: RowSweep,
    elements: Collection[torch.dtype] = FLOATS,
    *,
    is_near: bool = False,
    along: IndexInterval | None = None,
) -> bool:
    """Tell whether a sweep can be printed in lanes and takes fewer instructions there.

    Args:
        kernel: The kernel.
        plan: Its sweeps.
        one: One of them.
        elements: Dtypes of which one is what memory holds, of each value that varies along the row.
        is_near: Whether it is printed for operands near zero.
        along: The stretch of the row that it is printed for, if it is not the whole row.
    """
    gaining = _GAINING | _NEAR if is_near else _GAINING
    values = [p for p in one.values if plan.wide[p] and _counts(kernel, along, p)]
    shorter = [p for p in values if _is_shorter(kernel.body[p], gaining)]
    return bool(shorter) and stands_in_lanes(
        kernel, plan, one, elements, is_near=is_near, along=along
    )


def stands_in_lanes(
    kernel: Kernel,
    plan: SweepPlan,
    one: RowSweep,
    elements: Collection[torch.dtype] = FLOATS,
    *,
    is_near: bool = False,
    along: IndexInterval | None = None,
) -> bool:
    """Tell whether a sweep can be printed in lanes; see `gains_in_lanes`."""
    functions = _FUNCTIONS | _NEAR if is_near else _FUNCTIONS
    body = kernel.body
    needed = needed_values(kernel, one)
    values = [p for p in one.values if plan.wide[p] and p in needed and _counts(kernel, along, p)]
    computed = [unguarded(kernel, along, p) for p in values]
    kept = {*one.buffered, *one.keeps, *one.reductions}
    return (
        all(_can_stand(kernel, instruction, elements, functions) for instruction in computed)
        and all(_is_float(body[p]) for p in kept)
        and all(_can_fold(kernel, p) for p in one.reductions)
        and all(_is_stored(kernel, kernel.stores[p], elements) for p in one.stores)
    )


def _counts(kernel: Kernel, along: IndexInterval | None, position: int) -> bool:
    """Tell whether something comes of a value along a stretch."""
    return along is None or position in computed_along(kernel, along)


def unguarded(kernel: Kernel, along: IndexInterval | None, position: int) -> Instruction:
    """Return an instruction; a load whose guard holds all along a stretch without the guard."""
    load = kernel.body[position]
    if along is None or load.op != "load" or load.guard is None:
        return load
    if not outcome(kernel, along, load.guard):
        return load
    return replace(load, operands=load.indices, detail=replace(load.detail, otherwise=None))


def needed_values(kernel: Kernel, one: RowSweep) -> set[int]:
    """Return the values of a sweep that something comes of.

    Nothing comes of a rounding that storing its result does anyway. Of a check does: it may fail.
    """
    needed: set[int] = set()
    open_ = [p for p in one.values if kernel.body[p].op == "check"]
    open_ += [unrounded(kernel, p) for p in one.stores]
    open_ += [*one.keeps, *(kernel.body[p].operands[0] for p in one.reductions)]
    while open_:
        position = open_.pop()
        if position not in needed:
            needed.add(position)
            open_ += () if position in one.buffered else kernel.body[position].operands
    return needed


def epilogue_gains_in_lanes(kernel: Kernel, values: Iterable[int], held: Collection[int]) -> bool:
    """Tell whether what follows a value made of whole tensors takes fewer instructions in lanes.

    Args:
        kernel: The kernel, which stores numbers of rows only.
        values: What is computed for an element of a row, the value itself included.
        held: Those of them that arrays hold.
    """
    body = kernel.body
    computed = [body[p] for p in values if p not in held and not body[p].is_tensor_op]
    return (
        any(map(_is_shorter, computed))
        and all(i.op == "const" or _can_stand(kernel, i) for i in computed)
        and all(_is_float(body[p]) for p in held)
        and all(_is_stored(kernel, store) for store in kernel.stores)
    )


def _can_fold(kernel: Kernel, reduction: int) -> bool:
    """Tell whether lanes have a fold; that for maxima drops NaNs."""
    op = kernel.body[reduction].op
    return op == "reduce_add" or (op == "reduce_max" and reduction in nan_insensitive(kernel))


def _can_stand(
    kernel: Kernel,
    instruction: Instruction,
    elements: Collection[torch.dtype] = FLOATS,
    functions: frozenset[str] = _FUNCTIONS,
) -> bool:
    op = instruction.op
    operands = [kernel.body[o].dtype for o in instruction.operands]
    if op == "load":
        is_plain = not instruction.operands and instruction.guard is None
        return is_plain and _is_along(kernel, instruction.detail, elements)
    if op == "cast":
        return _is_float(instruction) and operands == [torch.bool]
    if op == "round":
        return _is_rounding(instruction)
    if op in _COMPARISONS:
        return all(dtype == torch.float32 for dtype in operands)
    if op in _LOGIC:
        return instruction.dtype == torch.bool
    return op in functions and _is_float(instruction) and _are_floats(operands[op == "select" :])


def _is_stored(kernel: Kernel, store: Store, elements: Collection[torch.dtype] = FLOATS) -> bool:
    """Tell whether what is stored varies along the row and is stored, or added to sums, there."""
    is_float = _is_float(kernel.body[store.value])
    return is_float and (store.is_sum or _is_along(kernel, store.access, elements))


def _are_floats(dtypes: Iterable[torch.dtype]) -> bool:
    return all(dtype == torch.float32 for dtype in dtypes)


def is_shorter_alone(kernel: Kernel, instruction: Instruction) -> bool:
    """Tell whether a function of one float takes fewer instructions in lanes of its own."""
    operands = [kernel.body[o] for o in instruction.operands]
    is_of_one = len(operands) == 1 and _is_float(operands[0]) and operands[0].op != "const"
    return is_of_one and instruction.op in _GAINING and _is_float(instruction)


def _is_shorter(instruction: Instruction, gaining: frozenset[str] = _GAINING) -> bool:
    if instruction.op == "round":
        return _is_rounding(instruction)
    return instruction.op in gaining and _is_float(instruction)


def _is_rounding(instruction: Instruction) -> bool:
    """Tell whether an instruction rounds float32 to bfloat16."""
    is_to_bfloat16 = instruction.op == "round" and instruction.detail == torch.bfloat16
    return is_to_bfloat16 and _is_float(instruction)


def _is_float(instruction: Instruction) -> bool:
    return instruction.dtype == torch.float32


def _is_along(kernel: Kernel, access: Access, elements: Collection[torch.dtype]) -> bool:
    """Tell whether an access walks memory in order."""
    is_next = access.strides[-1:] == (1,) and not access.scales
    return is_next and kernel.buffers[access.buffer].dtype in elements
