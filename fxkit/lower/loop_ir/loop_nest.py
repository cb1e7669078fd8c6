"""The loop nest: in which loops a kernel is computed, before it is text.

A nest is a tree of statements over one kernel of the loop IR. Its loops say how they run: one
iteration after another, unrolled, as the blocks of a grid, as the threads of a block, or as lanes:
neighbouring elements along one axis that one thread handles together, as a vector. Its other
statements compute an instruction of the kernel (`%2 = ...`), carry out one of its stores, or fold
into an accumulator what a reduction has come to. `plain_nest` makes loops over the axes of the
kernel, and each pass of `fxkit.lower.scheduling` makes another nest that computes the same. As
text, a softmax before any pass:

    parallel i0 < 9:
      f64 a1
      ...
      for j < 20:
        %0: f32 = load in0[20, 1]
        a1 = max(a1, %0)
      %1: f32 = a1

What one statement defines, later ones in the same block and in blocks within it may read: values of
the kernel, `%2`; index variables; and local arrays, such as `a1`, which have an element for each
iteration of the loops that their declaration names, and are indexed by those loops alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from fxkit.ir.types import short_dtype
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.nest_statements import (
    Accumulate,
    Allocate,
    Block,
    Compute,
    Define,
    For,
    If,
    InitAccumulator,
    PrecomputeReciprocal,
    ReduceThreads,
    Scan,
    ScanThreads,
    Statement,
    StoreLocal,
    StorePartial,
    VectorLoad,
    VectorStore,
    Write,
)


@dataclass(frozen=True, slots=True)
class PartialResult:
    """Memory for what each of several blocks that share a row leaves of a reduction.

    It has an element for each of them and each row.

    Attributes:
        name: Its name.
        dtype: What its elements are.
        splits: How many blocks share a row.
        offset: Bytes of scratch memory before it.
        size: Bytes that it takes.
    """

    name: str
    dtype: torch.dtype
    splits: int
    offset: int
    size: int


@dataclass(frozen=True)
class ThreadMapping:
    """How the work of a kernel is divided among the blocks and threads of a GPU.

    Attributes:
        width: How many elements that lie together in memory a thread handles at a time: its lanes.
        lane_axis: The axis along which they lie together.
        threads: Threads of a block.
        group: Threads that share a row; a block has `threads // group` rows.
        items: How many tiles of `width` elements of its row a thread holds in registers; 0 where
            rows are too long for that, and each sweep reads them again.
        splits: Blocks that share a row.
        share: Elements of a row that each of them takes.
        is_across: Whether neighbouring threads have neighbouring rows, and not parts of one.
    """

    width: int
    lane_axis: int
    threads: int
    group: int = 1
    items: int = 0
    splits: int = 1
    share: int = 0
    is_across: bool = False


@dataclass(frozen=True)
class LoopNest:
    """A kernel and the loops in which it is computed.

    Attributes:
        kernel: The kernel.
        body: The loops. Blocks at this level are launches, one after the other.
        is_aligned: Whether each buffer begins at a multiple of sixteen bytes.
        mapping: How the work is divided among blocks and threads; None before that is chosen.
        partials: What launches leave for later ones.
    """

    kernel: Kernel
    body: Block
    is_aligned: bool = True
    mapping: ThreadMapping | None = None
    partials: tuple[PartialResult, ...] = ()

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The name of the index along each axis: `i0, i1, …` of rows, `r0, r1, …, j` in them."""
        outer, rank = len(self.kernel.outer_sizes), len(self.kernel.sizes)
        names = [f"i{a}" if a < outer else f"r{a - outer}" for a in range(rank)]
        return (*names[:-1], "j")

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that partial results take."""
        return sum(partial.size for partial in self.partials)

    def __str__(self) -> str:
        return "\n".join(self._lines(self.body, 0))

    def _lines(self, body: Block, depth: int) -> Iterator[str]:
        for statement in body:
            yield "  " * depth + self._line(statement)
            if isinstance(statement, (For, If)):
                yield from self._lines(statement.body, depth + 1)

    def _line(self, statement: Statement) -> str:
        kernel = self.kernel
        match statement:
            case If(condition):
                return f"if {condition}:"
            case Define(name, value):
                return f"{name} = {value}"
            case Allocate(name, dtype, axes):
                return f"{short_dtype(dtype)} {name}{''.join(f'[{axis}]' for axis in axes)}"
            case Compute(value, None):
                return self._instruction(value)
            case Compute(value, source):
                return f"%{value}: {short_dtype(kernel.body[value].dtype)} = {source}"
            case StoreLocal(array, value):
                return f"{array} = %{value}"
            case Write(store, None):
                return kernel.store_line(store)
            case Write(store, array):
                return f"{array} = %{kernel.stores[store].value}"
            case VectorLoad(value, lanes):
                return f"{lanes.array} = {lanes.extent} lanes of %{value}"
            case VectorStore(store, lanes):
                return f"{kernel.store_line(store)} as {lanes.extent} lanes of {lanes.array}"
            case InitAccumulator(reduction, array):
                return f"{array} = neutral element of {self._monoid(reduction)}"
            case Accumulate(reduction, array, source):
                operand = source or f"%{kernel.body[reduction].operands[0]}"
                return f"{array} = {self._monoid(reduction)}({array}, {operand})"
            case ReduceThreads(reduction, array, loop):
                return f"{array} = {self._monoid(reduction)} of {array} over {loop}"
            case Scan(value, array):
                operand = f"%{kernel.body[value].operands[0]}"
                dtype = short_dtype(kernel.body[value].dtype)
                return f"%{value}: {dtype} = {array} = {self._monoid(value)}({array}, {operand})"
            case ScanThreads(value, array, carry, loop):
                monoid = self._monoid(value)
                return f"{array}, {carry} = {monoid} before and after {array} over {loop}"
            case StorePartial(partial, array):
                return f"{partial} = {array}"
            case PrecomputeReciprocal(value):
                return f"invert %{value}"
            case _:
                return str(statement)

    def _instruction(self, position: int) -> str:
        """Return an instruction as text, with constants in place."""
        constants = {
            f"%{o}": str(self.kernel.body[o].detail)
            for o in self.kernel.body[position].operands
            if self.kernel.body[o].op == "const"
        }
        text = self.kernel.line(position)
        return re.sub(r"%\d+", lambda found: constants.get(found[0], found[0]), text)

    def _monoid(self, reduction: int) -> str:
        return self.kernel.body[reduction].monoid
