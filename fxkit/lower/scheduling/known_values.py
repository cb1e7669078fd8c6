"""Static facts about a kernel's values: constants, use counts, bounds, which are rounded."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxkit.lower.loop_ir.builder import round_number
from fxkit.lower.loop_ir.loop_ir import Instruction, Kernel
from fxkit.lower.loop_ir.rounded_values import holds
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.folded_casts import far_numbers
from fxkit.lower.scheduling.nan_propagation import nan_insensitive


@dataclass(frozen=True)
class Largest:
    """What is subtracted from the numbers of a row.

    Attributes:
        maximum: The largest of them.
        scale: What it is multiplied with first, if it is.
        between: Values on the way from the maximum to the difference.
    """

    maximum: int
    scale: int | None = None
    between: tuple[int, ...] = ()


class KnownValues:
    """Facts about the values of one kernel, named by their positions in its body.

    Args:
        kernel: The kernel.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._body = kernel.body.__getitem__

    def number(self, position: int) -> float | None:
        """Return a number that is known in the text and no NaN, else None."""
        instruction = self._body(position)
        if instruction.op != "const" or is_runtime(instruction.detail.value):
            return None
        number = instruction.detail.value
        return None if number != number else number

    def operand_of(self, op: str, position: int) -> int | None:
        """Return the operand of an operation if it is that one, and needed but once."""
        instruction = self._body(position)
        is_alone = instruction.op == op and self.uses[position] == 1
        return instruction.operands[0] if is_alone else None

    @functools.cached_property
    def uses(self) -> Counter[int]:
        """How often each value is an operand or stored."""
        read = Counter(o for instruction in self._kernel.body for o in instruction.operands)
        return read + Counter(store.value for store in self._kernel.stores)

    def is_bfloat16(self, position: int) -> bool:
        """Tell whether a value is one of those that bfloat16 has, and needs no rounding."""
        instruction = self._body(position)
        if instruction.op == "load":
            otherwise = instruction.detail.otherwise
            buffer = self._kernel.buffers[instruction.detail.buffer]
            is_held = otherwise is None or _is_rounded(otherwise.value)
            return is_held and buffer.dtype == torch.bfloat16
        if instruction.op == "round":
            return instruction.detail == torch.bfloat16
        if instruction.op == "const":
            number = self.number(position)
            return number is not None and _is_rounded(number)
        if not holds(instruction.op, self._numbers_of(instruction), torch.bfloat16):
            return False
        operands = [o for o in instruction.operands if self._body(o).dtype == torch.float32]
        return all(self.is_bfloat16(operand) for operand in operands)

    @functools.cached_property
    def is_quiet(self) -> bool:
        """Whether all NaNs are quiet and end in noughts: then rounding to bfloat16 keeps them.

        Those that arithmetic makes are so, and those that were bfloat16.
        """
        read = {b.dtype for b in self._kernel.buffers if not b.is_output}
        return all(d == torch.bfloat16 or not d.is_floating_point for d in read)

    def is_at_most(self, bound: float, position: int) -> bool:
        """Tell whether a value, be it no NaN, is at most a bound of 0 or more.

        It is where it is x - max(x), as in a softmax, or -x * x, or a minimum with a number.
        """
        instruction = self._body(position)
        numbers = self._numbers_of(instruction)
        if self.largest_above(position) is not None:
            return True
        if instruction.op == "mul" and any(self._is_square(o) for o in instruction.operands):
            return any(factor <= 0 for factor in numbers)
        return instruction.op == "min" and any(number <= bound for number in numbers)

    def is_softmax_quotient(self, position: int) -> bool:
        """Tell whether a value is exp(x - max(x)) over the sum of those, which is 1 at least."""
        instruction = self._body(position)
        if instruction.op != "div" or instruction.dtype != torch.float32:
            return False
        value, total = instruction.operands
        is_sum = self._body(total).op == "reduce_add" and self._body(total).operands == (value,)
        if not is_sum or self._body(value).op != "exp":
            return False
        (exponent,) = self._body(value).operands
        return self.largest_above(exponent) is not None

    def largest_above(self, position: int) -> Largest | None:
        """Return m of a value x - m, or x * s - m * s with s above 0, where m is the largest x."""
        instruction = self._body(position)
        if instruction.op == "fma":
            value, scale, negative = instruction.operands
            number, inverted = self.number(scale), self._body(negative)
            if number is None or number <= 0 or inverted.op != "neg":
                return None
            subtracted = inverted.operands[0]
            scaled = self._body(subtracted)
            if scaled.op != "mul" or scaled.operands[1] != scale:
                return None
            found = Largest(scaled.operands[0], scale, (subtracted, negative))
        elif instruction.op == "sub":
            value, top = instruction.operands
            found = Largest(top)
        else:
            return None
        maximum = self._body(found.maximum)
        return found if maximum.op == "reduce_max" and maximum.operands == (value,) else None

    def serves_only(self, chain: Sequence[int]) -> bool:
        """Tell whether each value of a chain serves for nothing but the next one."""
        stored = {store.value for store in self._kernel.stores}
        return stored.isdisjoint(chain[:-1]) and all(
            self._users(position) == {user} for position, user in itertools.pairwise(chain)
        )

    def is_softmax_only(self, position: int) -> bool:
        """Tell whether exponentials of a row and their sum serve a softmax's quotients alone."""
        users = self._users(position)
        sums = {user for user in users if self._body(user).op == "reduce_add"}
        shares = users - sums
        return (
            bool(shares)
            and all(map(self.is_softmax_quotient, shares))
            and all(self._users(total) == shares for total in sums)
            and not any(store.value in {position, *sums} for store in self._kernel.stores)
        )

    def is_only_divisor(self, total: int) -> bool:
        """Tell whether a sum and what it sums are used by quotients alone.

        Then what they are multiplied with may as well be the inverse of the sum before it is
        rounded to float32: that is rounded once too, and no result tells the difference.
        """
        (value,) = self._body(total).operands
        return self.is_softmax_only(value)

    def has_rounded_quotients(self, position: int) -> bool:
        """Tell whether all quotients of an exponential are used as bfloat16 alone."""
        return all(
            map(self.serves_bfloat16, filter(self.is_softmax_quotient, self._users(position)))
        )

    def serves_bfloat16(self, position: int) -> bool:
        """Tell whether a value, and products of it, serve as numbers of bfloat16 alone."""
        users = [(user, self._body(user)) for user in self._users(position)]
        is_stored = any(store.value == position for store in self._kernel.stores)
        return not is_stored and all(
            self.serves_bfloat16(user)
            if instruction.op == "mul"
            else instruction.op == "round" and instruction.detail == torch.bfloat16
            for user, instruction in users
        )

    def _users(self, position: int) -> set[int]:
        return {p for p, i in enumerate(self._kernel.body) if position in i.operands}

    @functools.cached_property
    def nan_insensitive(self) -> frozenset[int]:
        """Maxima and minima of rows that need not be NaN where the row has one."""
        return nan_insensitive(self._kernel)

    def becomes_integer(self, position: int, dtype: torch.dtype) -> bool:
        """Tell whether the machine converts a float, be it what it may, to integers of a dtype.

        Where the compiler may know it to be a number that no integer is near, the compiler does;
        of a number that becomes a float again it leaves out the digits, and does not convert it.
        """
        return not self._far[position] and (position, dtype) not in self._converted_back

    @functools.cached_property
    def _far(self) -> list[bool]:
        return far_numbers(self._kernel)

    @functools.cached_property
    def _converted_back(self) -> set[tuple[int, torch.dtype]]:
        """Each value that becomes an integer of which a float is made, with the integer's dtype.

        Be it of the integer itself or of what operations make of it, which may come to nothing, as
        a maximum of two that are the same.
        """
        casts = [i for i in self._kernel.body if i.op == "cast" and i.dtype.is_floating_point]
        found, seen = set[tuple[int, torch.dtype]](), set[int]()
        open_ = [i.operands[0] for i in casts]
        while open_:
            position = open_.pop()
            made = self._body(position)
            if position in seen or not _is_integer(made) or made.op in ("load", "index"):
                continue
            seen.add(position)
            open_ += made.operands
            if made.op == "cast":
                found.add((made.operands[0], made.dtype))
        return found

    def _is_square(self, position: int) -> bool:
        instruction = self._body(position)
        return instruction.op == "mul" and len(set(instruction.operands)) == 1

    def _numbers_of(self, instruction: Instruction) -> list[float]:
        return [n for o in instruction.operands if (n := self.number(o)) is not None]


def _is_rounded(number: float) -> bool:
    return float(number) == round_number(float(number), torch.bfloat16)


def _is_integer(instruction: Instruction) -> bool:
    return not instruction.dtype.is_floating_point and instruction.dtype != torch.bool
