"""The base of all CUDA kernel printers: values, addresses, vector loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.kernel_printer import scaled
from fxkit.lower.codegen.cpp.lines import Lines
from fxkit.lower.codegen.cuda.layout import (
    Layout,
    ThreadGroup,
    index_type,
    is_uniform,
    is_whole,
    lane_axis,
)
from fxkit.lower.codegen.cuda.text import WRAPPING
from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel's function on the GPU.

    Attributes:
        name: Name of the function.
        across: Blocks in the first direction.
        down: Blocks in the second direction.
        threads: Threads of a block.
        text: The function's text.
    """

    name: str
    across: int
    down: int
    threads: int
    text: str


@dataclass(frozen=True)
class Tile:
    """What a thread computes of neighbours, at one place.

    Attributes:
        values: Instructions to compute, in order.
        known: Those among them that registers hold already.
        keeps: Those that registers go on to hold.
        stores: Positions of stores.
        reductions: Reductions to accumulate.
    """

    values: Collection[int]
    known: Collection[int] = ()
    keeps: Collection[int] = ()
    stores: Collection[int] = ()
    reductions: Collection[int] = ()


class CudaPrinter(Lines, ABC):
    """Writes one kernel as functions for a GPU.

    In the text, `i0, i1, …` index the axes that say which row it is, `r0, r1, …, j` those of the
    row; `l` counts the neighbours that a thread handles at a time, of which there are `count` where
    not all of them are there. `v3` is the value of instruction 3, `m3` what memory held, `o0` what
    store 0 writes, `k3` what registers hold for a later pass, `a3` what a reduction has come to.

    Args:
        kernel: The kernel; it has at least one axis.
        name: Name of the function.
        layout: How it is laid out.

    Attributes:
        layout: How it is laid out.
    """

    def __init__(self, kernel: Kernel, name: str, layout: Layout) -> None:
        super().__init__()
        self._kernel = kernel
        self._name = name
        self.layout = layout
        self._width = layout.width
        self._axis = (
            len(kernel.sizes) - 1
            if layout.family is ThreadGroup.POINTS
            else lane_axis(kernel, layout.family)
        )
        self._index = index_type(kernel)
        self._is_ragged = kernel.sizes[self._axis] % self._width != 0

    @abstractmethod
    def launches(self) -> list[Launch]:
        """Return the functions and how they are launched, one after the other."""

    @abstractmethod
    def _axis_names(self) -> list[str]:
        """Return the text of the index along each axis, that of a tile's first point."""

    @abstractmethod
    def _ref(self, position: int) -> str:
        """Return the text that stands for a value at one point."""

    @abstractmethod
    def _accumulate(self, position: int) -> None:
        """Fold the operand of a reduction into what it has come to."""

    # Functions.

    def _open_function(self, name: str, threads: int, *, has_scratch: bool = False) -> None:
        parts = [
            f"{'' if b.is_output else 'const '}{cpp_text.TYPES[b.dtype]}* __restrict__ {b.name}"
            for b in self._kernel.buffers
        ]
        parts += ["char* scratch"] if has_scratch else []
        # That one block at a time is enough lets the compiler use the registers that it needs.
        self._add(f'extern "C" __global__ void __launch_bounds__({threads}, 1)')
        self._open(f"{name}({', '.join(parts)}) {{")

    def _outer_index(self, number: str, sizes: tuple[int, ...], prefix: str = "i") -> None:
        """Compute the index along each of some axes from their number in order."""
        below = 1
        for size in sizes:
            below *= size
        for axis, size in enumerate(sizes):
            below = below // size if size else 1
            index = number if below == 1 else f"{number} / {below}"
            index = index if axis == 0 else f"{index} % {size}"
            self._add(f"const {self._index} {prefix}{axis} = {index};")

    # Tiles.

    def _tile(self, tile: Tile) -> None:
        """Print what a thread computes of neighbours: loads, each of them in turn, stores."""
        self._load_whole([p for p in tile.values if p not in tile.known])
        whole = [p for p in tile.stores if self._is_whole(self._kernel.stores[p].access)]
        for position in whole:
            access = self._kernel.stores[position].access
            dtype = self._kernel.buffers[access.buffer].dtype
            self._add(f"{cpp_text.TYPES[dtype]} o{position}[{self._width}];")
        self._open_lanes()
        for value in tile.values:
            if self._body(value).op == "const":
                continue
            text = self._kept(value) if value in tile.known else self._value(value)
            self._add(f"const {self._type(value)} v{value} = {text};")
        for value in tile.keeps:
            self._add(f"{self._kept(value)} = v{value};")
        for position in tile.stores:
            self._store(position, position in whole)
        for position in tile.reductions:
            self._accumulate(position)
        self._close()
        for position in whole:
            access = self._kernel.stores[position].access
            self._add(f"fx_store({self._pointer(access)}, o{position}{self._count_argument()});")

    def _load_whole(self, values: Iterable[int]) -> None:
        """Read what memory holds next to each other, sixteen bytes at a time."""
        for p in values:
            if self._body(p).op == "load" and self._is_whole_load(p):
                access = self._body(p).detail
                dtype = self._kernel.buffers[access.buffer].dtype
                guard = self._body(p).guard
                condition = "" if guard is None else f"if ({self._condition(guard)}) "
                self._add(f"{cpp_text.TYPES[dtype]} m{p}[{self._width}];")
                self._add(
                    f"{condition}fx_load(m{p}, {self._pointer(access)}{self._count_argument()});"
                )

    def _open_lanes(self) -> None:
        if self._width == 1:
            self._open("{")
            return
        self._add("#pragma unroll")
        self._open(f"for (int l = 0; l < {self._width}; ++l) {{")

    def _count_argument(self) -> str:
        return ", (int)count" if self._has_count else ""

    @property
    def _has_count(self) -> bool:
        """Whether some neighbours may not be there."""
        return self._is_ragged and self._width > 1

    def _kept(self, position: int) -> str:
        return f"k{position}[n]{'[l]' if self._width > 1 else ''}"

    def _is_whole(self, access: Access) -> bool:
        return is_whole(self._kernel, access, self._axis, self._width)

    def _is_whole_load(self, position: int) -> bool:
        guard = self._body(position).guard
        is_together = guard is None or is_uniform(self._kernel, guard, self._axis, self._width)
        return is_together and self._is_whole(self._body(position).detail)

    def _condition(self, position: int) -> str:
        """Return the text of a condition that is the same for all neighbours of a tile."""
        instruction = self._body(position)
        if instruction.op == "index":
            return f"({' + '.join(self._terms(instruction.detail)) or '0'})"
        operands = [self._condition(o) for o in instruction.operands]
        return f"({self._expression(instruction, operands)})"

    # Values.

    def _value(self, position: int) -> str:
        instruction = self._body(position)
        if instruction.op == "index":
            return self._place(instruction.detail)
        operands = [self._ref(o) for o in instruction.operands]
        if instruction.op == "load":
            return self._loaded(position, operands)
        if instruction.op == "check":
            return f"{'l >= count || ' if self._has_count else ''}fx_check({operands[0]})"
        if instruction.op == "round":
            return cpp_text.rounding(operands[0], instruction.detail)
        if instruction.op == "div" and instruction.dtype == torch.float32:
            divisor = self._divisor(instruction.operands[1])
            if divisor is not None:
                return f"fx_quotient({operands[0]}, {divisor})"
        return self._expression(instruction, operands)

    def _divisor(self, position: int) -> str | None:
        """Return the text of a value as what many numbers are divided by; None where it is not."""
        return f"fx_divisor({self._ref(position)})" if self._body(position).op == "const" else None

    def _expression(self, instruction: Instruction, operands: list[str]) -> str:
        if instruction.op in WRAPPING and instruction.dtype in (torch.int32, torch.int64):
            return f"fx_{instruction.op}({', '.join(operands)})"
        source = self._body(instruction.operands[0]).dtype if operands else instruction.dtype
        return cpp_text.expression(instruction, operands, source)

    def _loaded(self, position: int, operands: list[str]) -> str:
        instruction = self._body(position)
        access: Access = instruction.detail
        dtype = self._kernel.buffers[access.buffer].dtype
        if self._is_whole_load(position):
            text = cpp_text.load_expression(f"m{position}[l]", dtype)
            if access.otherwise is None:
                return text
            otherwise = cpp_text.literal(access.otherwise.value, instruction.dtype)
            return f"{operands[-1]} ? {text} : {otherwise}"
        name = self._kernel.buffers[access.buffer].name
        terms = [scaled(n, s) for n, s in zip(operands, access.scales, strict=False)]
        where = " + ".join([self._place(access), *terms])
        text = cpp_text.load_expression(f"{name}[{where}]", dtype)
        conditions = ["l < count"] if self._has_count else []
        otherwise = cpp_text.literal(0, instruction.dtype)
        if access.otherwise is not None:
            conditions.append(operands[-1])
            otherwise = cpp_text.literal(access.otherwise.value, instruction.dtype)
        return f"{' && '.join(conditions)} ? {text} : {otherwise}" if conditions else text

    def _place(self, access: Access) -> str:
        """Return the text of an address, in elements, of one point."""
        step = access.strides[self._axis]
        lane = [scaled("l", step)] if self._width > 1 and step else []
        return " + ".join([*self._terms(access), *lane]) or "0"

    def _pointer(self, access: Access) -> str:
        """Return the text of the address of a tile's first element."""
        return " + ".join([self._kernel.buffers[access.buffer].name, *self._terms(access)])

    def _terms(self, access: Access) -> list[str]:
        names = zip(self._axis_names(), access.strides, strict=True)
        terms = [scaled(name, step) for name, step in names if step]
        return [*terms, str(access.offset)] if access.offset else terms

    def _store(self, position: int, is_whole: bool) -> None:
        store = self._kernel.stores[position]
        buffer = self._kernel.buffers[store.access.buffer]
        value = store.value
        instruction = self._body(value)
        if instruction.op == "round" and instruction.detail == buffer.dtype:
            value = instruction.operands[0]
        text = cpp_text.store_expression(self._ref(value), buffer.dtype)
        if is_whole:
            self._add(f"o{position}[l] = {text};")
            return
        condition = "if (l < count) " if self._has_count else ""
        self._add(f"{condition}{buffer.name}[{self._place(store.access)}] = {text};")

    def _is_float_sum(self, position: int) -> bool:
        instruction = self._body(position)
        return instruction.op == "reduce_add" and instruction.dtype == torch.float32

    def _monoid(self, position: int) -> str:
        return self._body(position).op.removeprefix("reduce_")

    def _body(self, position: int) -> Instruction:
        return self._kernel.body[position]

    def _type(self, position: int) -> str:
        return cpp_text.TYPES[self._body(position).dtype]
