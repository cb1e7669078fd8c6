"""Full unrolling of short rows: written out point by point, no row is left.

A stack of three tensors that is reduced along the new dimension reads each of them under a guard,
at each point of rows of three. Unrolled, every guard is constant, and a sum is two additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxkit.lower.loop_ir.bits import Bits
from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel, Store
from fxkit.lower.scheduling.index_intervals import COMPARES

# Longer rows, and kernels of more instructions, stay loops.
MAX_ROW = 8
MAX_INSTRUCTIONS = 160

_MONOIDS = frozenset({"add", "mul", "max", "min"})

# What has a known outcome where both operands are known.
_DECIDED: dict[str, Callable[[Any, Any], int]] = {
    **COMPARES,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}


def is_short(kernel: Kernel) -> bool:
    """Tell whether the rows of a kernel lie across memory and are short enough to be written out.

    Args:
        kernel: A kernel all of whose numbers are known.
    """
    length = kernel.sizes[-1]
    loads = [i.detail for i in kernel.body if i.op == "load"]
    lies_across = any(a.strides[-2:-1] == (1,) for a in loads) and not any(
        a.strides[-1] == 1 for a in loads
    )
    known = {i.op.removeprefix("reduce_") for i in kernel.body if i.is_reduction}
    return (
        kernel.row_rank == 1
        and lies_across
        and 1 < length <= MAX_ROW
        and length * sum(kernel.row_wide) <= MAX_INSTRUCTIONS
        and known <= _MONOIDS
        and not any(i.is_scan or i.op == "check" for i in kernel.body)
        and not kernel.has_sums
    )


def unrolled(kernel: Kernel) -> Kernel:
    """Return a kernel that `is_short` without its row."""
    return _Unrolling(kernel).run()


class _Unrolling:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._wide = kernel.row_wide
        self._body: list[Instruction] = []
        self._known: dict[Instruction, int] = {}
        # Of each value its position for each point of the row; once, where it is the same for all.
        self._places: list[tuple[int, ...]] = []

    def run(self) -> Kernel:
        for instruction, is_wide in zip(self._kernel.body, self._wide, strict=True):
            if instruction.is_reduction:
                self._places.append((self._folded(instruction),))
            else:
                points = range(self._kernel.sizes[-1]) if is_wide else range(1)
                self._places.append(tuple(self._at(instruction, point) for point in points))
        return replace(
            self._kernel,
            sizes=self._kernel.sizes[:-1],
            row_rank=0,
            body=tuple(self._body),
            stores=tuple(self._stores()),
        )

    def _stores(self) -> Iterator[Store]:
        for store in self._kernel.stores:
            varies = self._wide[store.value] or bool(store.access.strides[-1])
            for point in range(self._kernel.sizes[-1] if varies else 1):
                yield Store(_moved(store.access, point), self._place(store.value, point))

    def _place(self, value: int, point: int) -> int:
        places = self._places[value]
        return places[point if len(places) > 1 else 0]

    def _folded(self, instruction: Instruction) -> int:
        """Append a reduction as a chain of operations."""
        op, (operand,) = instruction.op.removeprefix("reduce_"), instruction.operands
        points = [self._place(operand, point) for point in range(self._kernel.sizes[-1])]
        if op == "add" and instruction.dtype.is_floating_point:  # so that -0.0 adds up to 0.0
            points.insert(0, self._const(0.0, instruction.dtype))
        total = points[0]
        for point in points[1:]:
            total = self._append(Instruction(op, (total, point), instruction.dtype))
        return total

    def _at(self, instruction: Instruction, point: int) -> int:
        """Append what an instruction is at a point of the row."""
        operands = tuple(self._place(o, point) for o in instruction.operands)
        if instruction.op == "index":
            access = _moved(instruction.detail, point)
            if not any(access.strides):
                return self._const(access.offset, instruction.dtype)
            return self._append(replace(instruction, detail=access))
        if instruction.op == "load":
            return self._load(replace(instruction, operands=operands), point)
        numbers = [self._number(o) for o in operands]
        if instruction.op in _DECIDED and None not in numbers:
            return self._const(bool(_DECIDED[instruction.op](*numbers)), instruction.dtype)
        if instruction.op == "not" and type(numbers[0]) is bool:
            return self._const(not numbers[0], instruction.dtype)
        if instruction.op == "select" and numbers[0] is not None:
            return operands[1 if numbers[0] else 2]
        return self._append(replace(instruction, operands=operands))

    def _load(self, load: Instruction, point: int) -> int:
        access, guard = _moved(load.detail, point), load.guard
        holds = None if guard is None else self._number(guard)
        if holds is None:
            return self._append(replace(load, detail=access))
        if not holds and access.otherwise is not None:
            return self._const(access.otherwise.value, load.dtype)
        access = replace(access, otherwise=None)
        return self._append(replace(load, operands=load.operands[:-1], detail=access))

    def _number(self, place: int) -> bool | int | None:
        """Return the whole number or the truth that a value is, where it is known."""
        instruction = self._body[place]
        value = instruction.detail.value if instruction.op == "const" else None
        return value if isinstance(value, (bool, int)) else None

    def _const(self, value: bool | int | float, dtype: torch.dtype) -> int:
        if dtype.is_floating_point:
            value = float(value)
        return self._append(Instruction("const", (), dtype, Bits(value)))

    def _append(self, instruction: Instruction) -> int:
        if instruction not in self._known:
            self._known[instruction] = len(self._body)
            self._body.append(instruction)
        return self._known[instruction]


def _moved(access: Access, point: int) -> Access:
    """Return an access at a point of the row."""
    strides: Sequence[int] = access.strides
    offset = access.offset + strides[-1] * point
    return replace(access, strides=tuple(strides[:-1]), offset=offset)
