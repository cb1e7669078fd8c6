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
nothing of loops: in how many sweeps over the row it is computed follows from it
(`lower/scheduling/row_sweeps.py`).
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

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from fxkit.errors import FxkitError
from fxkit.ir.types import short_dtype
from fxkit.lower.loop_ir.bits import Bits
from fxkit.lower.loop_ir.tensor_op import TensorOp

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


@dataclass(frozen=True)
class Instruction:
    """One step of the body.

    Attributes:
        op: `load`, `index`, `check`, `const`, `cast`, `round`, `reduce_<monoid>`, `scan_<monoid>`,
            the operator of a `TensorOp`, or a scalar function of `scalar_functions.py`. The monoids
            are `add`, `mul`, `max` and `min`; of reductions also `and` and `or`; of scans of
            float64 also `logaddexp`, which adds numbers that are given by logarithms. Sums of
            floats are kept in float64 between blocks of the row.
        operands: Positions of earlier instructions; of a load, its indices, then its guard.
        dtype: Register dtype of the result.
        detail: The access of a load or an index, the number of a constant, the storage dtype of a
            rounding, or a `TensorOp`.
    """

    op: str
    operands: tuple[int, ...]
    dtype: torch.dtype
    detail: Any = None

    @cached_property
    def is_tensor_op(self) -> bool:
        """Whether it is a `TensorOp`: a product, a convolution or attention of whole tensors."""
        return self.detail is not None and isinstance(self.detail, TensorOp)

    @cached_property
    def is_reduction(self) -> bool:
        """Whether it folds a row into a row scalar."""
        return self.op.startswith("reduce_")

    @cached_property
    def is_scan(self) -> bool:
        """Whether it folds, for each point of a row, all of the row up to there."""
        return self.op.startswith("scan_")

    @property
    def monoid(self) -> str:
        """What a reduction or a scan folds by."""
        return self.op.removeprefix("reduce_").removeprefix("scan_")

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


@dataclass(frozen=True)
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

    def __post_init__(self) -> None:
        if any(a.is_output and not b.is_output for a, b in itertools.pairwise(self.buffers)):
            names = ", ".join(buffer.name for buffer in self.buffers)
            raise ValueError(f"expected all inputs before all outputs, got {names}")

    @cached_property
    def row_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes that form the row."""
        return self.sizes[len(self.sizes) - self.row_rank :]

    @cached_property
    def outer_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes that say which row it is."""
        return self.sizes[: len(self.sizes) - self.row_rank]

    @property
    def points(self) -> int:
        """Number of points in the box."""
        return math.prod(self.sizes)

    @cached_property
    def row_wide(self) -> list[bool]:
        """For each instruction, whether its value varies along the row."""
        wide: list[bool] = []
        rank = self.row_rank
        for instruction in self.body:
            op, detail = instruction.op, instruction.detail
            if op.startswith("reduce_"):
                wide.append(False)
            elif isinstance(detail, Access):
                along = detail.strides[len(detail.strides) - rank :]
                wide.append(any(along) or any(map(wide.__getitem__, instruction.operands)))
            elif op.startswith("scan_") or instruction.is_tensor_op:
                wide.append(True)
            else:
                wide.append(any(map(wide.__getitem__, instruction.operands)))
        return wide

    @cached_property
    def folds_rows(self) -> bool:
        """Whether it reduces or scans."""
        return any(i.is_reduction or i.is_scan for i in self.body)

    @property
    def tensor_op(self) -> TensorOp | None:
        """The product, convolution or attention that it begins with; None in other kernels."""
        return self.body[0].detail if self.body and self.body[0].is_tensor_op else None

    @property
    def has_sums(self) -> bool:
        """Whether it sums over all rows."""
        return any(map(attrgetter("is_sum"), self.stores))

    @property
    def may_fail(self) -> bool:
        """Whether it returns a number: zero, or else what it wrote is void."""
        return self.has_checks or self.has_sums

    @cached_property
    def has_checks(self) -> bool:
        """Whether it tells by the number that it returns that eager has to raise an error."""
        return "check" in [instruction.op for instruction in self.body]

    @cached_property
    def has_scans(self) -> bool:
        """Whether an instruction is a scan along the row."""
        return True in [instruction.is_scan for instruction in self.body]

    @cached_property
    def has_reductions(self) -> bool:
        """Whether an instruction is a reduction of the row."""
        return True in [instruction.is_reduction for instruction in self.body]

    def __str__(self) -> str:
        lines = [f"kernel {list(self.outer_sizes)} {list(self.row_sizes)}"]
        lines += [f"  {self.line(position)}" for position in range(len(self.body))]
        lines += [f"  {self.store_line(position)}" for position in range(len(self.stores))]
        return "\n".join(lines)

    def line(self, position: int) -> str:
        """Return an instruction as text."""
        i = self.body[position]
        operands = "" if i.op == "load" else ", ".join(f"%{o}" for o in i.operands)
        line = f"%{position}: {short_dtype(i.dtype)} = {i.op} {operands}{self._detail(i)}"
        return line.rstrip()

    def store_line(self, position: int) -> str:
        """Return a store as text."""
        store = self.stores[position]
        word = "sum" if store.is_sum else "store"
        return f"{word} {self._address(store.access)} %{store.value}"

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
