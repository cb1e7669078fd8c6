"""The base of all C++ kernel printers: values, addresses, indentation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.row_parts import row_offset
from fxkit.lower.codegen.cpp.strength_reduction import ShorterForms
from fxkit.lower.codegen.cpp.vector_loops import VectorLoops
from fxkit.lower.loop_ir.loop_ir import Access, Kernel
from fxkit.lower.loop_ir.rounded_values import unrounded
from fxkit.lower.loop_ir.runtime_parameters import (
    RuntimeInt,
    is_runtime,
    runtime_parameters,
)
from fxkit.lower.scheduling.cpu.cpu_schedule import PARTS
from fxkit.lower.scheduling.cpu.lane_loops import OWN_NAMES
from fxkit.lower.scheduling.cpu.stream_stores import copied_bytes
from fxkit.lower.scheduling.folded_casts import is_truncation
from fxkit.lower.scheduling.kernel_cost import cost_of_point
from fxkit.lower.scheduling.known_values import KnownValues
from fxkit.lower.scheduling.row_sweeps import RowSweep, SweepPlan

# Threads share the loop that follows; each has the same part of it in every call.
WORKSHARE = "#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)"

# The same in two steps, so that each thread can do something behind its part.
TEAM = "#pragma omp parallel num_threads(threads) if (threads > 1)"
WORKSHARE_IN_TEAM = "#pragma omp for schedule(static) nowait"

# Operations below which a kernel is never divided.
SMALL_WORK = 30_000

_ASSIGNMENTS = {"add": "+=", "mul": "*="}

_EXTREMA = {"max": ">", "min": "<"}


class KernelPrinter(VectorLoops, ABC):
    """Writes one kernel as a C++ function.

    Rows are divided into tiles, which threads share. In the text, `i0, i1, …` index the axes that
    say which row it is, `r0, r1, …, j` those of the row; `v3` is the value of instruction 3, `s3`
    a finished sum, `b3` a row buffer, `p3` a pointer to the first element of a row, `n3` a number
    that is known only at run time.

    Args:
        kernel: The kernel; its row has at least one axis.
        name: Name of the function.
        plan: The kernel's sweeps.
    """

    def __init__(self, kernel: Kernel, name: str, plan: SweepPlan) -> None:
        super().__init__(kernel)
        self._body = kernel.body.__getitem__
        self._name = name
        self._plan = plan
        self._free = runtime_parameters(kernel)
        self._pointers: dict[tuple[int, tuple[int, ...], int], str] = {}
        self._facts = KnownValues(kernel)
        self._shorter_forms = ShorterForms(kernel, self._facts, self._ref)

    def text(self) -> str:
        """Return the function's text."""
        faulty = self._kernel.has_checks
        self._open(
            f'extern "C" {self._attribute()}{"long" if faulty else "void"} '
            f"{self._name}({self._parameters()}) {{"
        )
        self._read_numbers()
        if faulty:
            self._add("long fault = 0;")
        self._before_tiles()
        self._open_team()
        self._workshare_tiles()
        self._open(f"for (long tile = 0; tile < {self._tile_count()}; ++tile) {{")
        self._tile()
        self._close()
        self._close_team()
        if faulty:
            self._add("return fault;")
        self._close()
        return self._taken()

    def _open_team(self) -> None:
        """Open what each thread does, if it has to be said."""
        if not self._streams:
            return
        size = copied_bytes(self._kernel, self._streams)
        is_wide = "FX_WIDE > 1 && " if self._streams_in_lanes else ""
        self._add(f"const bool is_streamed = {is_wide}{size} >= fx_least_streamed;")
        self._add(TEAM)
        self._open("{")

    def _close_team(self) -> None:
        """Let others see what a thread has written past the caches."""
        if self._streams:
            self._add("fx_fence();")
            self._close()

    def _before_tiles(self) -> None:
        """Print what is done before the first tile: nothing."""

    def _tile(self) -> None:
        """Print what is done with one tile."""
        self._tile_index()
        self._point_into_buffers(self._accesses())
        self._tile_body()

    def _tile_body(self) -> None:
        """Print what is computed of one tile."""
        self._declare()
        for one in self._plan.sweeps:
            self._row_scalars(one.scalars, ())
            if one.reductions or one.stores or one.keeps:
                self._sweep(one)
        self._row_scalars(self._plan.scalars, self._row_stores())

    def _attribute(self) -> str:
        """Return how the compiler is told to treat the function, with a space behind it."""
        return ""

    def _workshare_tiles(self) -> None:
        """Let threads share the loop that follows."""
        count = self._tile_count()
        if is_runtime(count) or (count > 1 and not self._is_small):
            self._workshare()

    def _workshare(self) -> None:
        shared = WORKSHARE_IN_TEAM if self._streams else WORKSHARE
        self._add(f"{shared}{self._workshare_clause()}")

    def _workshare_clause(self) -> str:
        """Return how threads share what the tiles do not have of their own."""
        return self._fault_clause(range(len(self._kernel.body)))

    @property
    def _is_small(self) -> bool:
        """Whether a call takes so little that to ask for threads costs more, be it for one."""
        work = self._kernel.points * cost_of_point(self._kernel.body)
        return not is_runtime(work) and work < SMALL_WORK

    @abstractmethod
    def _tile_count(self) -> int:
        """Return the number of tiles."""

    @abstractmethod
    def _tile_index(self) -> None:
        """Compute from the number of a tile where it lies."""

    @abstractmethod
    def _declare(self) -> None:
        """Declare what lives as long as a tile."""

    @abstractmethod
    def _row_scalars(self, values: Iterable[int], stores: Iterable[int]) -> None:
        """Compute row scalars, and store those that are results."""

    @abstractmethod
    def _sweep(self, one: RowSweep) -> None:
        """Print one sweep over the row."""

    @abstractmethod
    def _ref(self, position: int) -> str:
        """Return the text that stands for a value."""

    @abstractmethod
    def _lane_terms(self, access: Access) -> list[str]:
        """Return the terms of an address that vary along the rows of a tile."""

    def _address(self, access: Access, indices: Iterable[str] = ()) -> str:
        """Return the text of an element in memory."""
        terms = self._row_terms(access) + self._lane_terms(access)
        terms += [scaled(n, s) for n, s in zip(indices, access.scales, strict=True)]
        return f"{self._pointers[self._key(access)]}[{' + '.join(terms) or '0'}]"

    def _index(self, access: Access) -> str:
        """Return the text of an address as a number."""
        terms = self._tile_terms(access) + self._row_terms(access) + self._lane_terms(access)
        return " + ".join([*terms, *([f"{access.offset}"] if access.offset else [])]) or "0"

    def _check(self, position: int) -> None:
        """Note where a check does not hold."""
        if self._body(position).op == "check":
            self._add(f"fault |= !{self._ref(position)};")

    def _fault_clause(self, values: Iterable[int]) -> str:
        has_checks = any(self._body(value).op == "check" for value in values)
        return " reduction(|:fault)" if has_checks else ""

    def _parameters(self) -> str:
        parts = [
            f"{'' if b.is_output else 'const '}{cpp_text.MEMORY[b.dtype]}* __restrict {b.name}"
            for b in self._kernel.buffers
        ]
        numbers = ["const long* numbers"] if self._free else []
        return ", ".join([*parts, *numbers, "long threads"])

    def _read_numbers(self) -> None:
        """Read the numbers that are known only at run time."""
        for place, number in enumerate(self._free):
            if isinstance(number, RuntimeInt):
                self._add(f"const long {number.text} = numbers[{place}];")
            else:
                self._add(f"const double {number.text} = ((const double*)numbers)[{place}];")

    def _outer_index(self, row: str, sizes: tuple[int, ...]) -> None:
        """Compute the index along each outer axis from the number of the row."""
        for axis, size in enumerate(sizes):
            below = math.prod(sizes[axis + 1 :])
            index = f"{row} / {below}" if sizes[axis + 1 :] else row
            index = index if axis == 0 else f"{index} % {size}"
            self._add(f"const long i{axis} = {index};")

    def _accesses(self) -> list[Access]:
        """Return how memory is read and written."""
        loads = [i.detail for i in self._kernel.body if i.op == "load"]
        return loads + [store.access for store in self._kernel.stores]

    def _point_into_buffers(self, accesses: Iterable[Access]) -> None:
        """Declare, for each way a buffer is walked, a pointer to the row's first element."""
        for access in accesses:
            key = self._key(access)
            if key in self._pointers:
                continue
            self._pointers[key] = f"p{len(self._pointers)}"
            buffer = self._kernel.buffers[access.buffer]
            const = "" if buffer.is_output else "const "
            terms = self._tile_terms(access)
            terms += [str(access.offset)] if access.offset else []
            where = " + ".join([buffer.name, *terms])
            self._add(
                f"{const}{cpp_text.MEMORY[buffer.dtype]}* const {self._pointers[key]} = {where};"
            )

    def _tile_terms(self, access: Access) -> list[str]:
        """Return the terms of an address that are fixed in a tile."""
        outer = access.strides[: len(self._kernel.outer_sizes)]
        return [scaled(f"i{axis}", stride) for axis, stride in enumerate(outer) if stride]

    def _key(self, access: Access) -> tuple[int, tuple[int, ...], int]:
        outer = access.strides[: len(self._kernel.outer_sizes)]
        return access.buffer, outer, access.offset

    def _row_stores(self) -> list[int]:
        """Return the positions of the stores of one element a row."""
        carried = {p for one in self._plan.sweeps for p in one.stores}
        return [p for p in range(len(self._kernel.stores)) if p not in carried]

    def _row_terms(self, access: Access) -> list[str]:
        """Return the terms of an address that vary along the row."""
        strides = access.strides[len(self._kernel.outer_sizes) :]
        names = [*(f"r{axis}" for axis in range(len(strides) - 1)), self._index_in_row]
        return [scaled(n, stride) for n, stride in zip(names, strides, strict=True) if stride]

    @property
    def _index_in_row(self) -> str:
        """The index along the innermost axis of the row, as text."""
        return self._place

    def _open_row_axes(self) -> None:
        """Open loops over all axes of the row but the innermost."""
        for axis, size in enumerate(self._kernel.row_sizes[:-1]):
            self._open(f"for (long r{axis} = 0; r{axis} < {size}; ++r{axis}) {{")

    def _row_offset(self) -> str:
        """Return the position within the row, as its buffers are laid out."""
        return row_offset(self._kernel.row_sizes)

    def _open_blocks(self, begin: str | int, end: str | int, block: int) -> tuple[str, str]:
        """Open a loop over blocks of the innermost row axis; return a block's bounds."""
        return self._open_pieces("block", begin, end, block)

    def _open_pieces(
        self, name: str, begin: str | int, end: str | int, size: int
    ) -> tuple[str, str]:
        """Open a loop over pieces of the innermost row axis by a name; return a piece's bounds."""
        self._open(f"for (long {name} = {begin}; {name} < {end}; {name} += {size}) {{")
        until = f"{name} + {size}"
        if isinstance(end, str) or is_runtime(end) or end % size:
            self._add(f"const long {name}_end = {until} < {end} ? {until} : {end};")
            until = f"{name}_end"
        return name, until

    def _open_parts(self, length: int, size: int) -> None:
        """Open a loop over parts of a row, which threads share."""
        self._add(WORKSHARE)
        self._open(f"for (long part = 0; part < {PARTS}; ++part) {{")
        for name, start in (("first", f"part * {size}"), ("last", f"part * {size} + {size}")):
            self._add(f"const long {name} = {start} < {length} ? {start} : {length};")

    def _accumulate(self, position: int, into: str) -> None:
        """Fold the operand of a reduction or a scan into its accumulator."""
        self._fold(position, into, self._ref(self._body(position).operands[0]))

    def _accumulate_extremum(self, position: int, into: str, nan: str) -> None:
        """Fold the operand of a reduction that drops NaNs into its accumulator."""
        value, compare = self._ref(self._body(position).operands[0]), self._comparison(position)
        if self._notes_nans(position):
            self._add(f"{nan} |= {value} != {value};")
        self._add(f"{into} = {value} {compare} {into} ? {value} : {into};")

    def _drops_nans(self, position: int) -> bool:
        """Tell whether a reduction is one instruction for a vector, which drops NaNs."""
        instruction = self._body(position)
        is_extremum = instruction.is_reduction and self._monoid(position) in _EXTREMA
        return is_extremum and instruction.dtype.is_floating_point

    def _notes_nans(self, position: int) -> bool:
        """Tell whether a reduction notes aside that it met a NaN."""
        return self._drops_nans(position) and position not in self._facts.nan_insensitive

    def _comparison(self, position: int) -> str:
        """Return the comparison of a value with an extremum that it replaces."""
        return _EXTREMA[self._monoid(position)]

    def _flag(self, position: int) -> str:
        """Return the integer type of as many bits as a value has."""
        return "int" if self._body(position).dtype.itemsize == 4 else "long"

    def _fold(self, position: int, into: str, operand: str) -> None:
        """Combine an accumulator of a reduction with another value."""
        if self._monoid(position) in _ASSIGNMENTS:
            self._add(f"{into} {_ASSIGNMENTS[self._monoid(position)]} {operand};")
        else:
            self._add(f"{into} = fx_{self._monoid(position)}({into}, {operand});")

    def _store(self, position: int) -> None:
        store = self._kernel.stores[position]
        dtype = self._kernel.buffers[store.access.buffer].dtype
        value = unrounded(self._kernel, position)
        staged = self._staged_write(store.access)
        if staged is not None:
            self._set_at(staged, self._ref(value))
            return
        is_held = dtype == torch.bfloat16 and self._facts.is_bfloat16(value)
        text = cpp_text.store_expression(
            self._ref(value), dtype, self._facts.is_quiet, is_held, self._is_lone
        )
        self._write_result(store.access, text)

    def _value(self, position: int) -> str:
        instruction = self._body(position)
        if instruction.is_scan:
            return self._scanned(position)
        if instruction.op == "index":
            return self._index(instruction.detail)
        operands = [self._ref(o) for o in instruction.operands]
        if instruction.op == "check":
            return operands[0]
        if instruction.op == "load":
            staged = self._staged_read(position)
            return self._loaded(position) if staged is None else self._value_at(staged)
        if instruction.op == "round":
            return cpp_text.rounding(
                operands[0], instruction.detail, self._facts.is_quiet, self._is_lone
            )
        if self._at_once and instruction.op in OWN_NAMES:
            return f"fx_{instruction.op}({operands[0]})"
        text = self._shorter_forms.text(position) or cpp_text.expression(
            instruction, operands, self._dtype(instruction.operands[:1], instruction.dtype)
        )
        if is_truncation(self._kernel, position):
            return f"fx_unsigned_zero({text})"
        return text

    def _loaded(self, position: int) -> str:
        """Return the text of an element that is loaded where it stands."""
        instruction = self._body(position)
        access, operands = instruction.detail, [self._ref(o) for o in instruction.operands]
        dtype = self._kernel.buffers[access.buffer].dtype
        address = self._value_at(self._address(access, operands[: len(instruction.indices)]))
        text = cpp_text.load_expression(address, dtype, self._is_lone)
        if instruction.guard is None or self._holds(instruction.guard):
            return text
        otherwise = cpp_text.literal(access.otherwise.value, instruction.dtype)
        return f"{operands[-1]} ? {text} : {otherwise}"

    def _dtype(self, operands: tuple[int, ...], otherwise: torch.dtype) -> torch.dtype:
        return self._body(operands[0]).dtype if operands else otherwise

    def _scanned(self, position: int) -> str:
        """Return the text of what a scan has come to."""
        return f"a{position}"

    def _is_float_sum(self, position: int) -> bool:
        instruction = self._body(position)
        return instruction.op == "reduce_add" and instruction.dtype == torch.float32

    def _monoid(self, position: int) -> str:
        return self._body(position).op.removeprefix("reduce_").removeprefix("scan_")

    def _type(self, position: int) -> str:
        dtype = self._body(position).dtype
        return cpp_text.LANE_TYPES[dtype] if self._at_once else cpp_text.TYPES[dtype]


def scaled(name: str, factor: int) -> str:
    """Return a term of an address."""
    return name if factor == 1 else f"{name} * {factor}"
