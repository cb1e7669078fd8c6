"""The accuracy of float32 sums along a row, at most twice eager's error, vectorised or not.

A vectorised loop adds the numbers of a block in lanes: with 16 lanes, each adds 64 of a block's
1,024. Blocks are shorter on processors with fewer than eight lanes. Some loops are not vectorised
by the compiler: the same text then adds 1,024 numbers one after the other, with up to 70 times
eager's error. Such sums are accumulated in float64, and so are those of many numbers that may be
equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from fxkit import cpu_info
from fxkit.lower.loop_ir.loop_ir import Access, Kernel
from fxkit.lower.loop_ir.rounded_values import unrounded
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.index_intervals import IndexInterval
from fxkit.lower.scheduling.row_sweeps import RowSweep

# Float sums are kept in float64 from one block to the next. A lane adds at most 128 elements of
# one: 8 lanes those of the longer block, 4 lanes, of SSE or NEON, those of the shorter.
_BLOCK, _BLOCK_OF_FEW_LANES = 1024, 512

# Numbers that are the same are rounded the same way. Where there may be many of them, a sum in
# float32 takes so many elements, or so many vectors in lanes, one after the other.
FEW = 16

# What any compiler makes vector code of, with values of as many bytes as the sum has, or of twice
# as many.
_VECTOR_CODE = frozenset(
    """load index const cast round add sub mul div fma neg abs sqrt floor ceil trunc rint copysign
    max min select lt le gt ge eq ne and or xor not exp log tanh erf sigmoid normal_cdf expm1
    log1p""".split()
)
_WIDTHS = frozenset({torch.float32, torch.int32, torch.bool})
_LONG_VECTOR_CODE = frozenset({"load", "index", "add", "sub"})

# Whole numbers up to here have no rounded sum within a block.
_LARGEST_EXACT = 1 << 13


def block_size() -> int:
    """Return how many elements are summed in float32 on this processor, before float64 goes on."""
    return _BLOCK if "avx" in cpu_info.features() else _BLOCK_OF_FEW_LANES


class RowSums:
    """What sums along the rows of a kernel ask for.

    Args:
        kernel: The kernel.
        stretches: The stretches that its row is cut into, if it is.
    """

    def __init__(self, kernel: Kernel, stretches: Sequence[IndexInterval] = ()) -> None:
        self._kernel = kernel
        self._body = kernel.body.__getitem__
        self._stretches = stretches
        self._wide = kernel.row_wide

    def are_in_double(self, one: RowSweep) -> bool:
        """Tell whether a sweep sums in float64 from the first element."""
        return (
            self._moves_narrow(one)
            or not all(map(self._becomes_vector_code, self._needed(one)))
            or not all(map(_is_in_order, (self._kernel.stores[p].access for p in one.stores)))
            or self.has_whole_loops(one)
            or self.may_repeat(one)
        )

    def may_repeat(self, one: RowSweep) -> bool:
        """Tell whether a sweep may sum a number that has to be rounded over and over."""
        return any(map(self._chooses_the_same, self._needed(one)))

    def divides(self, one: RowSweep) -> int | None:
        """Return the condition by which the loops of a sweep are divided in the text, if any."""
        conditions = self._dividing(one)
        return min(conditions) if len(conditions) == 1 and not self.has_whole_loops(one) else None

    def has_whole_loops(self, one: RowSweep) -> bool:
        """Tell whether the compiler has to leave the loops of a sweep as they are."""
        conditions = self._dividing(one)
        is_divided = len(conditions) == 1 and len(self._stretches) == 1
        return bool(conditions) and (not is_divided or any(self._wide[o] for o in conditions))

    def asks_the_same(self, position: int) -> bool:
        """Tell whether a maximum or a minimum would ask of the same number over and over.

        It asks whether its first operand is NaN.
        """
        instruction = self._body(position)
        if instruction.op not in ("max", "min") or not instruction.dtype.is_floating_point:
            return False
        first, second = instruction.operands
        return not self._varies[first] and self._varies[second]

    def _dividing(self, one: RowSweep) -> set[int]:
        """Return the conditions of a sweep with results of rows that are the same all along."""
        if not one.reductions:
            return set()
        read = {o for p in self._needed(one) for o in self._body(p).operands}
        return {
            o
            for o in read
            if self._body(o).dtype == torch.bool and not self._varies[o] and not self._settled[o]
        }

    def _moves_narrow(self, one: RowSweep) -> bool:
        """Tell whether a sweep moves conditions or small integers.

        Compilers handle as many elements at once as a vector has of the narrowest, and put so many
        sums of floats together one by one, or make no vector code of it: too far from eager.
        """
        moved = [self._body(p).dtype for p in one.values if self._body(p).op == "load"]
        moved += [self._body(self._kernel.stores[p].value).dtype for p in one.stores]
        return any(dtype.itemsize < 4 and not dtype.is_floating_point for dtype in moved)

    def _becomes_vector_code(self, position: int) -> bool:
        instruction = self._body(position)
        if instruction.dtype == torch.int64:
            is_known = instruction.op in _LONG_VECTOR_CODE
        else:
            is_known = instruction.op in _VECTOR_CODE and instruction.dtype in _WIDTHS
        if instruction.op == "cast":
            return is_known and self._body(instruction.operands[0]).dtype in _WIDTHS
        if not is_known or instruction.op != "load":
            return is_known
        guard = instruction.guard
        is_plain = guard is None or self._settled[guard] or not self._varies[guard]
        return is_plain and not instruction.indices and _is_in_order(instruction.detail)

    def _chooses_the_same(self, position: int) -> bool:
        """Tell whether a value may be the same number for many elements, and one to be rounded."""
        instruction = self._body(position)
        if instruction.op not in ("select", "max", "min", "copysign"):
            return False
        chosen = {
            "select": instruction.operands[1:],
            "copysign": instruction.operands[:1],
        }.get(instruction.op, instruction.operands)
        return any(not self._varies[o] and not self._is_exact(o) for o in chosen)

    def _is_exact(self, position: int) -> bool:
        instruction = self._body(position)
        if instruction.op != "const" or is_runtime(instruction.detail.value):
            return False
        number = float(instruction.detail.value)
        is_small = number.is_integer() and abs(number) <= _LARGEST_EXACT
        return is_small or not math.isfinite(number)

    def _needed(self, one: RowSweep) -> list[int]:
        """Return the values along the row that a sweep computes for its results."""
        found = set[int]()
        open_ = [self._body(p).operands[0] for p in one.reductions]
        open_ += [*one.keeps, *(unrounded(self._kernel, p) for p in one.stores)]
        while open_:
            position = open_.pop()
            is_computed = self._varies[position] and position not in one.buffered
            if is_computed and position not in found and not self._settled[position]:
                found.add(position)
                open_ += self._body(position).operands
        return sorted(found)

    @functools.cached_property
    def _settled(self) -> list[bool]:
        """Whether each value is a condition that is known in the text of each loop, or a number."""
        known = [stretch.known.keys() for stretch in self._stretches]
        in_all = frozenset.intersection(*map(frozenset, known)) if known else frozenset()
        settled: list[bool] = []
        for position, instruction in enumerate(self._kernel.body):
            is_logic = instruction.op in ("and", "or", "not") and instruction.dtype == torch.bool
            settled.append(
                all(settled[o] for o in instruction.operands)
                if is_logic
                else instruction.op == "const" or position in in_all
            )
        return settled

    @functools.cached_property
    def _varies(self) -> list[bool]:
        """Whether each value varies along the innermost axis of the row."""
        varies: list[bool] = []
        for instruction in self._kernel.body:
            is_walked = instruction.op in ("load", "index") and bool(instruction.detail.strides[-1])
            varies.append(
                not instruction.is_reduction
                and (
                    is_walked
                    or instruction.is_scan
                    or instruction.is_tensor_op
                    or any(map(varies.__getitem__, instruction.operands))
                )
            )
        return varies


def _is_in_order(access: Access) -> bool:
    """Tell whether an access walks neighbours in memory, or stays where it is."""
    step = access.strides[-1]
    return not is_runtime(step) and abs(step) <= 1
