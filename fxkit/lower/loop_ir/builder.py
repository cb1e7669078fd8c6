"""How bodies of kernels are written: values whose arithmetic appends instructions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from fxkit.ir.types import short_dtype
from fxkit.lower.loop_ir.bits import Bits, Number
from fxkit.lower.loop_ir.loop_ir import STORAGE_ONLY, Access, Instruction, Unfusable, register_of
from fxkit.lower.loop_ir.rounded_values import holds
from fxkit.lower.loop_ir.scalar_functions import check_call


@dataclass(eq=False, slots=True)
class Ref:
    """A value of a body under construction; arithmetic on it appends instructions."""

    builder: Builder
    position: int

    @property
    def dtype(self) -> torch.dtype:
        """Register dtype."""
        return self.builder.body[self.position].dtype

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point number."""
        return self.dtype.is_floating_point

    def _binary(self, op: str, other: Operand, dtype: torch.dtype | None = None) -> Ref:
        return self.builder.scalar(op, self, other, dtype=dtype)

    def _reflected(self, op: str, other: Number) -> Ref:
        return self.builder.scalar(op, self.builder.const(other, self.dtype), self)

    def __add__(self, other: Operand) -> Ref:
        return self._binary("add", other)

    def __radd__(self, other: Number) -> Ref:
        return self._reflected("add", other)

    def __sub__(self, other: Operand) -> Ref:
        return self._binary("sub", other)

    def __rsub__(self, other: Number) -> Ref:
        return self._reflected("sub", other)

    def __mul__(self, other: Operand) -> Ref:
        return self._binary("mul", other)

    def __rmul__(self, other: Number) -> Ref:
        return self._reflected("mul", other)

    def __truediv__(self, other: Operand) -> Ref:
        return self._binary("div", other)

    def __rtruediv__(self, other: Number) -> Ref:
        return self._reflected("div", other)

    def __neg__(self) -> Ref:
        return self.builder.scalar("neg", self)

    def __lt__(self, other: Operand) -> Ref:
        return self._binary("lt", other, torch.bool)

    def __le__(self, other: Operand) -> Ref:
        return self._binary("le", other, torch.bool)

    def __gt__(self, other: Operand) -> Ref:
        return self._binary("gt", other, torch.bool)

    def __ge__(self, other: Operand) -> Ref:
        return self._binary("ge", other, torch.bool)

    def equals(self, other: Operand) -> Ref:
        """Compare for equality; `==` itself stays identity, as Python containers need it."""
        return self._binary("eq", other, torch.bool)

    def differs(self, other: Operand) -> Ref:
        """Compare for inequality."""
        return self._binary("ne", other, torch.bool)

    def __and__(self, other: Operand) -> Ref:
        return self._binary("and", other)

    def __or__(self, other: Operand) -> Ref:
        return self._binary("or", other)

    def __xor__(self, other: Operand) -> Ref:
        return self._binary("xor", other)

    def __invert__(self) -> Ref:
        return self.builder.scalar("not", self)

    def cast(self, dtype: torch.dtype) -> Ref:
        """Convert to a dtype; to one that only memory has, by rounding, if the builder rounds."""
        return self.builder.cast(self, dtype)


Operand = Ref | Number


@dataclass(slots=True)
class Builder:
    """Builds the body of a kernel; equal instructions are made once.

    Attributes:
        body: The instructions so far.
        rounds: Whether a conversion to a dtype that only memory has rounds, as eager does.
    """

    body: list[Instruction] = field(default_factory=list)
    rounds: bool = True
    _known: dict[Instruction, int] = field(default_factory=dict)
    _rounded: dict[int, torch.dtype] = field(default_factory=dict)

    def append(self, instruction: Instruction) -> Ref:
        """Return the value of an instruction, adding it unless an equal one is there."""
        position = self._known.setdefault(instruction, len(self.body))
        if position == len(self.body):
            self.body.append(instruction)
        return Ref(self, position)

    def __contains__(self, instruction: Instruction) -> bool:
        return instruction in self._known

    def load(
        self,
        access: Access,
        dtype: torch.dtype,
        indices: Sequence[Ref] = (),
        guard: Ref | None = None,
        otherwise: Number = 0,
    ) -> Ref:
        """Read an element of memory that holds `dtype`.

        Args:
            access: The address, with a scale for each of the indices.
            dtype: Element type in memory.
            indices: Integers that are added to the address, each times its scale.
            guard: Where it is false, memory is not touched.
            otherwise: The value there.
        """
        operands = [index.position for index in indices]
        if guard is not None:
            operands.append(guard.position)
            access = replace(access, otherwise=Bits(round_number(otherwise, dtype)))
        value = self.append(Instruction("load", tuple(operands), register_of(dtype), access))
        self._rounded[value.position] = dtype
        return value

    def again(self, instruction: Instruction, operands: Sequence[int]) -> Ref:
        """Return the value of an instruction of the body, but of other operands."""
        value = self.append(replace(instruction, operands=tuple(operands)))
        if instruction.op == "round":
            self._rounded[value.position] = instruction.detail
        return value

    def index(
        self, strides: Sequence[int], offset: int = 0, dtype: torch.dtype = torch.int64
    ) -> Ref:
        """Return the number `offset + sum(stride * axis)`, one stride for each axis."""
        access = Access(-1, tuple(strides), offset)
        return self.append(Instruction("index", (), dtype, access))

    def check(self, condition: Ref) -> Ref:
        """Return a condition that must hold, or else eager is asked to raise its error."""
        return self.append(Instruction("check", (condition.position,), torch.bool))

    def const(self, value: Number, dtype: torch.dtype) -> Ref:
        """Make a number of `dtype`, rounded as torch rounds a Python number."""
        rounded = round_number(value, dtype)
        return self.append(Instruction("const", (), register_of(dtype), Bits(rounded)))

    def scalar(self, op: str, *operands: Operand, dtype: torch.dtype | None = None) -> Ref:
        """Apply a scalar function; Python numbers take the dtype of the first `Ref` operand.

        Raises:
            InvalidGraphError: The table has no row for `op`, or one of another arity.
        """
        check_call(op, len(operands))
        first, *_ = [operand for operand in operands if isinstance(operand, Ref)]
        refs = [o if isinstance(o, Ref) else self.const(o, first.dtype) for o in operands]
        positions = tuple([ref.position for ref in refs])
        return self.append(Instruction(op, positions, dtype or refs[0].dtype))

    def reduce(self, monoid: str, value: Ref) -> Ref:
        """Fold a value along the row."""
        return self.append(Instruction(f"reduce_{monoid}", (value.position,), value.dtype))

    def scan(self, monoid: str, value: Ref) -> Ref:
        """Fold, at each point of the row, all elements up to it; the row must have one axis."""
        return self.append(Instruction(f"scan_{monoid}", (value.position,), value.dtype))

    def cast(self, value: Ref, dtype: torch.dtype) -> Ref:
        """Convert a value; see `Ref.cast`."""
        return self.stored(value, dtype) if self.rounds else self._in_register(value, dtype)

    def stored(self, value: Ref, dtype: torch.dtype) -> Ref:
        """Convert a value to one that memory of a dtype can hold."""
        value = self._in_register(value, dtype)
        if dtype in STORAGE_ONLY and not self._is_rounded(value.position, dtype):
            value = self.append(Instruction("round", (value.position,), value.dtype, dtype))
            self._rounded[value.position] = dtype
        return value

    def scaled_down(self, value: Ref) -> tuple[Ref, float] | None:
        """Return another value and a power of two below 1 if a value of float32 is their product.

        Where the other is one of bfloat16, the product may be rounded to that too: it has the same
        digits, unless it is subnormal.
        """
        product = self.body[value.position]
        is_rounded = product.op == "round" and product.detail == torch.bfloat16
        if is_rounded:
            product = self.body[product.operands[0]]
        if product.op != "mul" or product.dtype != torch.float32:
            return None
        for number, other in itertools.permutations(product.operands):
            constant = self.body[number]
            if constant.op != "const" or type(constant.detail.value) is not float:
                continue
            scale = constant.detail.value
            is_power = 2.0**-100 < scale < 1 and math.frexp(scale)[0] == 0.5
            if is_power and (not is_rounded or self._is_rounded(other, torch.bfloat16)):
                return Ref(self, other), scale
        return None

    def _in_register(self, value: Ref, dtype: torch.dtype) -> Ref:
        register = register_of(dtype)
        if value.dtype == register:
            return value
        return self.append(Instruction("cast", (value.position,), register))

    def _is_rounded(self, position: int, dtype: torch.dtype) -> bool:
        """Tell whether a value is one of those that a dtype of memory has."""
        if position in self._rounded:
            return self._rounded[position] == dtype
        instruction = self.body[position]
        if instruction.op == "const":
            number = instruction.detail.value
            return Bits(float(number)) == Bits(round_number(number, dtype))
        operands = [self.body[o] for o in instruction.operands]
        if not holds(instruction.op, [o.detail.value for o in operands if o.op == "const"], dtype):
            return False
        found = all(
            self._is_rounded(operand, dtype)
            for operand in instruction.operands
            if self.body[operand].dtype.is_floating_point
        )
        if found:
            self._rounded[position] = dtype
        return found


def round_number(value: Number, dtype: torch.dtype) -> Number:
    """Return a Python number as torch converts it to `dtype`.

    Raises:
        Unfusable: When an integer dtype can't hold it; eager raises or wraps, by operator.
    """
    if dtype == torch.bool:
        return bool(value)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise Unfusable(f"the number {value} does not fit into {short_dtype(dtype)}")
        return int(value)
    if dtype == torch.float64:
        return float(value)
    return torch.tensor(float(value), dtype=torch.float64).to(dtype).item()
