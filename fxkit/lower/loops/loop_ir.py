"""The loop IR: what a fused kernel computes, before it is text.

A kernel runs over a box of integer axes. The last `row_rank` axes form the *row* that reductions
run along; the others say which row it is. Its body is a list of instructions in single-assignment
form, each with an explicit register dtype. Loads and stores address a buffer by an offset and one
stride for each axis, so that views, transposes and broadcasting (stride 0) are folded into the
address. A load may also add integer values times strides to its address, as a gather does, and may
be guarded: where its guard is false the memory is not touched, and the value is a given number.
`index` is such an address as a number, `check` says what must hold everywhere: where it does not,
the kernel returns other than zero, what it wrote is void, and eager runs to raise its error.
An embedding whose first row reads as zeros, as text:

    kernel [100] [64]
      %0: i64 = load in0[1, 0]
      %1: i64 = const 0
      %2: b1 = ge %0, %1
      ...
      %5: b1 = check %4
      %6: f32 = load in1[0, 1] + %0 * 64 if %5 else 0.0
      store out0[64, 1] %6

A value is *row-wide* when it has one element for each point of the row, else it is a *row scalar*:
a constant, a load that is the same all along the row, or the result of a reduction. The body says
nothing of loops: in how many passes over the row it is computed follows from it (`schedule.py`).
A softmax, as text:

    kernel [4096] [1024]
      %0: f32 = load in0[1024, 1]
      %1: f32 = reduce_max %0
      %2: f32 = sub %0, %1
      %3: f32 = exp %2
      %4: f32 = reduce_add %3
      %5: f32 = div %3, %4
      store out0[1024, 1] %5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxkit.errors import FxkitError
from fxkit.ir.types import short_dtype
from fxkit.lower.loops.bits import Bits, Number
from fxkit.lower.loops.held_values import holds

# Element types that only memory has: in registers they are float32, already rounded.
STORAGE_ONLY = {torch.bfloat16: torch.float32, torch.float16: torch.float32}

REGISTERS = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)

SUPPORTED = REGISTERS | set(STORAGE_ONLY)

# The monoids that reduce a row. `add` of floats is kept in float64 between blocks of the row.
MONOIDS = frozenset({"add", "mul", "max", "min", "and", "or"})

# The monoids of scans. `logaddexp`, of float64 alone, adds numbers that are given by logarithms.
SCANS = frozenset({"add", "mul", "max", "min", "logaddexp"})


# Operators of whole tensors. A kernel has at most one of them, as its first instruction.
WHOLE = frozenset({"product", "convolution", "depthwise", "attention"})


class Unfusable(FxkitError):
    """A call that a kernel can't compute as eager does; the message is the reason."""


def register_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements of `dtype` are computed."""
    return STORAGE_ONLY.get(dtype, dtype)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a kernel reads or writes.

    Attributes:
        name: Its name in the kernel's text, `in0` or `out0`.
        dtype: Element type in memory.
        is_output: Whether the kernel writes it; outputs share memory with nothing.
    """

    name: str
    dtype: torch.dtype
    is_output: bool


@dataclass(frozen=True, slots=True)
class Access:
    """The address of an element: `offset + sum(stride * axis) + sum(scale * index)`, in elements.

    Attributes:
        buffer: Position of the buffer.
        strides: A stride for each axis of the kernel.
        offset: Where the address begins.
        scales: For each index that a load has among its operands, its stride.
        otherwise: The value of a guarded load where its guard, its last operand, is false; None for
            a load without a guard.
    """

    buffer: int
    strides: tuple[int, ...]
    offset: int = 0
    scales: tuple[int, ...] = ()
    otherwise: Bits | None = None


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of the body.

    Attributes:
        op: `load`, `index`, `check`, `const`, `cast`, `round`, `reduce_<monoid>`, `scan_<monoid>`,
            or a scalar operation.
        operands: Positions of earlier instructions; of a load, its indices, then its guard.
        dtype: Register dtype of the result.
        detail: The access of a load or an index, the number of a constant, the storage dtype of a
            rounding.
    """

    op: str
    operands: tuple[int, ...]
    dtype: torch.dtype
    detail: Any = None

    @property
    def is_reduction(self) -> bool:
        """Whether it folds a row into a row scalar."""
        return self.op.startswith("reduce_")

    @property
    def is_scan(self) -> bool:
        """Whether it folds, for each point of a row, all of the row up to there."""
        return self.op.startswith("scan_")

    @property
    def indices(self) -> tuple[int, ...]:
        """The values that a load adds to its address."""
        return self.operands[: len(self.detail.scales)]

    @property
    def guard(self) -> int | None:
        """The value that says where a load touches memory; None when it does everywhere."""
        return None if self.detail.otherwise is None else self.operands[-1]


@dataclass(frozen=True, slots=True)
class Store:
    """Write a value to memory, once for each point of the box, or once a row for a row scalar.

    Attributes:
        access: Where.
        value: What.
        is_sum: Whether what is written, once for each point of a row, is the sum over all rows. The
            address does not depend on the row then.
    """

    access: Access
    value: int
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A fused kernel.

    Attributes:
        sizes: Size of each axis; those of the row come last.
        row_rank: How many of the axes form the row. 0 in a kernel without reductions.
        buffers: Memory it touches: inputs in the order of its arguments, then outputs.
        body: Instructions, each after its operands.
        stores: What is written.
    """

    sizes: tuple[int, ...]
    row_rank: int
    buffers: tuple[Buffer, ...]
    body: tuple[Instruction, ...]
    stores: tuple[Store, ...]

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes that form the row."""
        return self.sizes[len(self.sizes) - self.row_rank :]

    @property
    def outer_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes that say which row it is."""
        return self.sizes[: len(self.sizes) - self.row_rank]

    @property
    def points(self) -> int:
        """Number of points in the box."""
        return math.prod(self.sizes)

    def row_wide(self) -> list[bool]:
        """Tell for each instruction whether its value varies along the row."""
        wide: list[bool] = []
        rank = self.row_rank
        for instruction in self.body:
            if instruction.is_reduction or instruction.is_scan or instruction.op in WHOLE:
                wide.append(not instruction.is_reduction)
                continue
            varies = any(wide[operand] for operand in instruction.operands)
            if instruction.op in ("load", "index"):
                strides = instruction.detail.strides
                varies = varies or any(strides[len(strides) - rank :])
            wide.append(varies)
        return wide

    @property
    def has_sums(self) -> bool:
        """Whether it sums over all rows."""
        return any(store.is_sum for store in self.stores)

    @property
    def may_fail(self) -> bool:
        """Whether it returns a number: zero, or else what it wrote is void."""
        return self.has_checks or self.has_sums

    @property
    def has_checks(self) -> bool:
        """Whether it tells by the number that it returns that eager has to raise an error."""
        return any(instruction.op == "check" for instruction in self.body)

    def __str__(self) -> str:
        lines = [f"kernel {list(self.outer_sizes)} {list(self.row_sizes)}"]
        for position, i in enumerate(self.body):
            operands = "" if i.op == "load" else ", ".join(f"%{o}" for o in i.operands)
            lines.append(
                f"  %{position}: {short_dtype(i.dtype)} = {i.op} {operands}{self._detail(i)}"
            )
        words = ("store", "sum")
        lines += [f"  {words[s.is_sum]} {self._address(s.access)} %{s.value}" for s in self.stores]
        return "\n".join(line.rstrip() for line in lines)

    def _detail(self, instruction: Instruction) -> str:
        detail = instruction.detail
        if instruction.op == "index":
            return _affine(detail)
        if isinstance(detail, Access):
            terms = zip(instruction.indices, detail.scales, strict=True)
            indices = "".join(f" + %{o} * {scale}" for o, scale in terms)
            guard = instruction.guard
            condition = "" if guard is None else f" if %{guard} else {detail.otherwise}"
            return f"{self._address(detail)}{indices}{condition}"
        if isinstance(detail, torch.dtype):
            return f" to {short_dtype(detail)}"
        return "" if detail is None else f"{detail}"

    def _address(self, access: Access) -> str:
        return f"{self.buffers[access.buffer].name}{_affine(access)}"


def _affine(access: Access) -> str:
    offset = f" + {access.offset}" if access.offset else ""
    return f"{list(access.strides)}{offset}"


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
        position = self._known.get(instruction)
        if position is None:
            position = len(self.body)
            self._known[instruction] = position
            self.body.append(instruction)
        return Ref(self, position)

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
        """Apply a scalar operation; Python numbers take the dtype of the first `Ref` operand."""
        model = next(operand for operand in operands if isinstance(operand, Ref))
        refs = [o if isinstance(o, Ref) else self.const(o, model.dtype) for o in operands]
        positions = tuple(ref.position for ref in refs)
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
