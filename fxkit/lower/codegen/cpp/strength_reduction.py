"""Strength reduction: cheaper forms of an operation where bounds of its operand are known.

An exponential of a bounded operand needs no overflow handling, and less precision where a factor
cancels; a maximum with a constant needs no second NaN test, nor does the tanh of a log1p. A value
that the compiler can't fold needs no range check before it is cast to an integer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from fxkit.lower.codegen.cpp.text import TYPES, integer_between
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.known_values import KnownValues

# What `fx_exp_down` serves: up to here exp needs no scaling in two steps.
_MOST_EXPONENT = 40

# Above it, tanh(x) and tanh of a softplus are 1.
_LEAST_SATURATED = 10


class ShorterForms:
    """Finds the shorter texts of a kernel's operations.

    Args:
        kernel: The kernel.
        known: What is known of its values.
        ref: Position of a value → the text that stands for it.
    """

    def __init__(self, kernel: Kernel, known: KnownValues, ref: Callable[[int], str]) -> None:
        self._kernel = kernel
        self._facts = known
        self._ref = ref

    def text(self, position: int) -> str | None:
        """Return what takes less work than an operation does in general, or None."""
        instruction = self._kernel.body[position]
        is_float = instruction.dtype == torch.float32
        match instruction.op, instruction.operands:
            case "max" | "min", (left, right):
                return self._bounded(instruction.op == "max", left, right)
            case "exp", (operand,) if is_float:
                return self._exponential(position, operand)
            case "sigmoid", (operand,) if is_float and self._facts.serves_bfloat16(position):
                return f"fx_coarse_sigmoid({self._ref(operand)})"
            case "div", (value, divisor) if is_float and self._facts.serves_bfloat16(position):
                return self._gated(value, divisor)
            case "tanh", (operand,) if is_float:
                return self._tanh_log1p(operand)
            case "add", (left, right) if is_float:
                return self._exp_plus_one(left, right) or self._exp_plus_one(right, left)
            case "cast", (operand,):
                return self._integer(operand, instruction.dtype)
        return None

    def _exponential(self, position: int, operand: int) -> str | None:
        """Return the exponential of what is small; times 2^64 where only shares of it are used."""
        if not self._facts.is_at_most(_MOST_EXPONENT, operand):
            return None
        name = "fx_exp_down"
        if self._facts.is_softmax_only(position):
            is_rounded = self._facts.has_rounded_quotients(position)
            name = "fx_coarse_exp_raised" if is_rounded else "fx_exp_raised"
        return f"{name}({self._ref(operand)})"

    def _gated(self, value: int, divisor: int) -> str | None:
        """Return the text of a value over 1 + exp(-x), as in silu, where few digits are needed."""
        summed = self._kernel.body[divisor]
        if summed.op != "add" or self._facts.uses[divisor] > 1:
            return None
        for left, right in itertools.permutations(summed.operands):
            exponent = self._exponent_beside_one(left, right)
            if exponent is not None and self._kernel.body[exponent].op == "neg":
                gate = self._ref(self._kernel.body[exponent].operands[0])
                return f"fx_coarse_gated({self._ref(value)}, {gate})"
        return None

    def _integer(self, operand: int, dtype: torch.dtype) -> str | None:
        """Return the machine's own conversion, where the compiler has none to put in its place."""
        source = self._kernel.body[operand].dtype
        is_whole = source.is_floating_point and not dtype.is_floating_point
        if not is_whole or dtype == torch.bool or not self._facts.becomes_integer(operand, dtype):
            return None
        return f"({TYPES[dtype]})({integer_between(source, dtype)}){self._ref(operand)}"

    def _bounded(self, is_most: bool, left: int, right: int) -> str | None:
        """Return the maximum or minimum with a number: then a NaN need not be looked for twice.

        Of two zeros it is that which is no constant, as in eager.
        """
        if self._facts.number(right) is not None:
            value, bound = self._ref(left), self._ref(right)
            return f"{value} {'<' if is_most else '>'} {bound} ? {bound} : {value}"
        if self._facts.number(left) is not None:
            bound, value = self._ref(left), self._ref(right)
            return f"{bound} {'>' if is_most else '<'} {value} ? {bound} : {value}"
        return None

    def _exp_plus_one(self, left: int, right: int) -> str | None:
        """Return the text of a sum if it is exp(x) + 1, which rounds once and needs no scaling."""
        exponent = self._exponent_beside_one(left, right)
        return None if exponent is None else f"fx_exp_plus_one({self._ref(exponent)})"

    def _exponent_beside_one(self, left: int, right: int) -> int | None:
        """Return x if two operands are 1 and exp(x)."""
        return self._facts.operand_of("exp", right) if self._facts.number(left) == 1.0 else None

    def _tanh_log1p(self, operand: int) -> str | None:
        """Return the text of the tanh of log(1 + x) or of a softplus, as in mish."""
        chosen = self._kernel.body[operand]
        if chosen.op != "select":
            shifted = self._facts.operand_of("log1p", operand)
            return None if shifted is None else self._tanh_of_shifted(shifted)
        condition, above, below = chosen.operands
        shifted = self._facts.operand_of("log1p", below)
        compare = self._kernel.body[condition]
        if shifted is None or self._facts.uses[operand] > 1 or compare.op != "gt":
            return None
        is_one = (self._facts.number(compare.operands[1]) or 0) >= _LEAST_SATURATED
        exponential = self._kernel.body[shifted]
        is_softplus = exponential.op == "exp" and (
            (above,) == exponential.operands == compare.operands[:1]
        )
        return self._tanh_of_shifted(shifted) if is_one and is_softplus else None

    def _tanh_of_shifted(self, shifted: int) -> str:
        """Return the text of tanh(log(1 + x)), where x may be an exponential of its own."""
        exponent = self._facts.operand_of("exp", shifted)
        if exponent is None:
            return f"fx_tanh_log1p({self._ref(shifted)})"
        return f"fx_tanh_softplus({self._ref(exponent)})"
