"""Loop IR → C++ text. Pure: the same kernels give the same text, and nothing else is touched.

The text includes no header. Each kernel is one function of its buffers and the number of threads.
Rows are divided among threads; along a row the compiler makes vector code of plain loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from fxkit.lower import cpp_text, vector_math
from fxkit.lower.loop_ir import Access, Instruction, Kernel
from fxkit.lower.schedule import Pass, Schedule, schedule

# A row without reductions is cut into tiles of this many elements, for the threads to share.
TILE = 4096

# Float sums are kept in float64 from one block of this many elements to the next.
BLOCK = 1024


def print_unit(kernels: Mapping[str, Kernel], glibc: tuple[int, int] | None) -> str:
    """Return a translation unit.

    Args:
        kernels: Name → kernel.
        glibc: Version of the C library on x86-64, or None where it has no vector functions.
    """
    texts = [print_kernel(kernel, name) for name, kernel in kernels.items()]
    return "\n".join([_preamble(kernels.values(), glibc), *texts])


def _preamble(kernels: Iterable[Kernel], glibc: tuple[int, int] | None) -> str:
    own: set[str] = set()
    library: set[tuple[str, torch.dtype]] = set()
    operations: set[str] = set()
    for kernel in kernels:
        storage = {buffer.dtype for buffer in kernel.buffers}
        storage |= {i.detail for i in kernel.body if i.op == "round"}
        own |= cpp_text.own_functions(kernel.body, storage)
        library |= cpp_text.library_functions(kernel.body)
        operations |= {f"{i.op}:{i.dtype}" for i in kernel.body}
    parts = [vector_math.BASICS, cpp_text.MINMAX]
    ordered = sorted(library, key=str)
    parts += [cpp_text.declaration(op, dtype, glibc) for op, dtype in ordered]
    if f"sigmoid:{torch.float64}" in operations:
        parts.append(cpp_text.SIGMOID64)
    parts.append(vector_math.definitions(own))
    parts.append(_REDUCTIONS)
    return "\n".join(parts)


_TYPES = "float, double, long, int, short, signed char, unsigned char, bool"
_REDUCTIONS = "".join(
    f"#pragma omp declare reduction({name} : {_TYPES} : omp_out = {name}(omp_out, omp_in)) "
    "initializer(omp_priv = omp_orig)\n"
    for name in ("fx_max", "fx_min")
)


def print_kernel(kernel: Kernel, name: str) -> str:
    """Return the text of one kernel."""
    return _Printer(_with_row(kernel), name).text()


def _with_row(kernel: Kernel) -> Kernel:
    """Make the innermost axis of a kernel without reductions its row."""
    if kernel.row_rank:
        return kernel
    if kernel.sizes:
        return replace(kernel, row_rank=1)

    def widened(access: Access) -> Access:
        return replace(access, strides=(0,))

    body = tuple(replace(i, detail=widened(i.detail)) if i.op == "load" else i for i in kernel.body)
    stores = tuple(replace(s, access=widened(s.access)) for s in kernel.stores)
    return replace(kernel, sizes=(1,), row_rank=1, body=body, stores=stores)


class _Printer:
    def __init__(self, kernel: Kernel, name: str) -> None:
        self._kernel = kernel
        self._name = name
        self._schedule: Schedule = schedule(kernel)
        self._lines: list[str] = []
        self._depth = 0
        self._length = kernel.row_sizes[-1]
        has_reductions = any(i.is_reduction for i in kernel.body)
        self._tiles = 1 if has_reductions else -(-self._length // TILE)
        self._pointers: dict[tuple[int, tuple[int, ...], int], str] = {}

    def text(self) -> str:
        self._open(f'extern "C" void {self._name}({self._parameters()}) {{')
        self._add("#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)")
        rows = math.prod(self._kernel.outer_sizes)
        self._open(f"for (long tile = 0; tile < {rows * self._tiles}; ++tile) {{")
        self._row_index()
        self._point_into_buffers()
        for value in self._schedule.buffers:
            size = math.prod(self._kernel.row_sizes)
            self._add(f"alignas(64) {self._type(value)} b{value}[{size}];")
        for number, one in enumerate(self._schedule.passes):
            self._scalars(one.scalars)
            self._pass(one, number)
        self._scalars(self._schedule.scalars)
        self._store_row_scalars()
        self._close()
        self._close()
        return "\n".join(self._lines) + "\n"

    def _parameters(self) -> str:
        parts = [
            f"{'' if b.is_output else 'const '}{cpp_text.TYPES[b.dtype]}* __restrict {b.name}"
            for b in self._kernel.buffers
        ]
        return ", ".join([*parts, "long threads"])

    def _row_index(self) -> None:
        """Compute the index along each outer axis from the number of the tile."""
        row = "tile" if self._tiles == 1 else f"tile / {self._tiles}"
        sizes = self._kernel.outer_sizes
        below = math.prod(sizes)
        for axis, size in enumerate(sizes):
            below //= size
            index = row if below == 1 else f"{row} / {below}"
            index = index if axis == 0 else f"{index} % {size}"
            self._add(f"const long i{axis} = {index};")
        if self._tiles > 1:
            self._add(f"const long begin = tile % {self._tiles} * {TILE};")
            self._add(f"const long end = begin + {TILE} < {self._length} ? begin + {TILE} : "
                      f"{self._length};")  # fmt: skip

    def _point_into_buffers(self) -> None:
        """Declare, for each way a buffer is walked, a pointer to the row's first element."""
        accesses = [i.detail for i in self._kernel.body if i.op == "load"]
        accesses += [store.access for store in self._kernel.stores]
        for access in accesses:
            key = self._key(access)
            if key in self._pointers:
                continue
            self._pointers[key] = f"p{len(self._pointers)}"
            buffer = self._kernel.buffers[access.buffer]
            const = "" if buffer.is_output else "const "
            terms = [f"i{axis} * {stride}" for axis, stride in enumerate(key[1]) if stride]
            terms += [str(access.offset)] if access.offset else []
            where = " + ".join([buffer.name, *terms])
            self._add(
                f"{const}{cpp_text.TYPES[buffer.dtype]}* const {self._pointers[key]} = {where};"
            )

    def _key(self, access: Access) -> tuple[int, tuple[int, ...], int]:
        outer = access.strides[: len(self._kernel.outer_sizes)]
        return access.buffer, outer, access.offset

    def _pass(self, one: Pass, number: int) -> None:
        """Print one pass over the row: its accumulators and its loops."""
        if not (one.reductions or one.stores or one.keeps):
            return
        blocked = [p for p in one.reductions if self._is_float_sum(p)]
        for p in one.reductions:
            zero = cpp_text.identity_of(self._monoid(p), self._body(p).dtype)
            kind = "double" if p in blocked else self._type(p)
            self._add(
                f"{kind} {'t' if p in blocked else 'v'}{p} = {'0' if p in blocked else zero};"
            )
        depth = self._depth
        for axis, size in enumerate(self._kernel.row_sizes[:-1]):
            self._open(f"for (long r{axis} = 0; r{axis} < {size}; ++r{axis}) {{")
        begin, end = ("begin", "end") if self._tiles > 1 else ("0", str(self._length))
        if blocked and self._length > BLOCK:
            begin, end = self._open_blocks(self._length, BLOCK)
        for p in blocked:
            self._add(f"{self._type(p)} v{p} = 0;")
        self._add(f"#pragma omp simd{self._clauses(one.reductions)}")
        self._open(f"for (long j = {begin}; j < {end}; ++j) {{")
        self._loop_body(one)
        self._close()
        for p in blocked:
            self._add(f"t{p} += v{p};")
        while self._depth > depth:
            self._close()
        for p in blocked:
            self._add(f"const {self._type(p)} s{p} = ({self._type(p)})t{p};")

    def _open_blocks(self, length: int, block: int) -> tuple[str, str]:
        """Open a loop over blocks of the innermost row axis; return a block's bounds."""
        self._open(f"for (long block = 0; block < {length}; block += {block}) {{")
        end = f"block + {block}"
        if length % block:
            self._add(f"const long block_end = {end} < {length} ? {end} : {length};")
            end = "block_end"
        return "block", end

    def _is_float_sum(self, position: int) -> bool:
        instruction = self._body(position)
        return instruction.op == "reduce_add" and instruction.dtype == torch.float32

    def _monoid(self, position: int) -> str:
        return self._body(position).op.removeprefix("reduce_")

    def _clauses(self, reductions: Iterable[int]) -> str:
        names = {"add": "+", "max": "fx_max", "min": "fx_min"}
        return "".join(f" reduction({names[self._monoid(p)]} : v{p})" for p in reductions)

    def _loop_body(self, one: Pass) -> None:
        for value in sorted({*one.values, *one.buffered}):
            text = (
                f"b{value}[{self._row_offset()}]" if value in one.buffered else self._value(value)
            )
            self._add(f"const {self._type(value)} v{value} = {text};")
        for value in one.keeps:
            self._add(f"b{value}[{self._row_offset()}] = v{value};")
        for p in one.stores:
            self._store(p)
        for p in one.reductions:
            operand = self._ref(self._body(p).operands[0])
            if self._monoid(p) == "add":
                self._add(f"v{p} += {operand};")
            else:
                self._add(f"v{p} = fx_{self._monoid(p)}(v{p}, {operand});")

    def _row_offset(self) -> str:
        """Return the position within the row, as its buffers are laid out."""
        terms = []
        below = math.prod(self._kernel.row_sizes)
        for axis, size in enumerate(self._kernel.row_sizes[:-1]):
            below //= size
            terms.append(f"r{axis} * {below}")
        return " + ".join([*terms, "j"])

    def _scalars(self, values: Iterable[int]) -> None:
        for value in values:
            if self._body(value).op != "const":
                self._add(f"const {self._type(value)} v{value} = {self._value(value)};")

    def _store_row_scalars(self) -> None:
        rank = len(self._kernel.outer_sizes)
        for p, store in enumerate(self._kernel.stores):
            carried = {p for one in self._schedule.passes for p in one.stores}
            if p not in carried and not any(store.access.strides[rank:]):
                self._store(p)

    def _store(self, position: int) -> None:
        store = self._kernel.stores[position]
        dtype = self._kernel.buffers[store.access.buffer].dtype
        value = store.value
        instruction = self._body(value)
        if instruction.op == "round" and instruction.detail == dtype:
            value = instruction.operands[0]
        text = cpp_text.store_expression(self._ref(value), dtype)
        self._add(f"{self._address(store.access)} = {text};")

    def _value(self, position: int) -> str:
        instruction = self._body(position)
        if instruction.op == "load":
            dtype = self._kernel.buffers[instruction.detail.buffer].dtype
            return cpp_text.load_expression(self._address(instruction.detail), dtype)
        operands = [self._ref(o) for o in instruction.operands]
        source = self._body(instruction.operands[0]).dtype if operands else instruction.dtype
        return cpp_text.expression(instruction, operands, source)

    def _ref(self, position: int) -> str:
        instruction = self._body(position)
        if instruction.op == "const":
            return cpp_text.expression(instruction, [], instruction.dtype)
        return f"{'s' if self._is_float_sum(position) else 'v'}{position}"

    def _address(self, access: Access) -> str:
        strides = access.strides[len(self._kernel.outer_sizes) :]
        names = [*(f"r{axis}" for axis in range(len(strides) - 1)), "j"]
        terms = [
            name if stride == 1 else f"{name} * {stride}"
            for name, stride in zip(names, strides, strict=True)
            if stride
        ]
        return f"{self._pointers[self._key(access)]}[{' + '.join(terms) or '0'}]"

    def _body(self, position: int) -> Instruction:
        return self._kernel.body[position]

    def _type(self, position: int) -> str:
        return cpp_text.TYPES[self._body(position).dtype]

    def _add(self, line: str) -> None:
        self._lines.append("  " * self._depth + line)

    def _open(self, line: str) -> None:
        self._add(line)
        self._depth += 1

    def _close(self) -> None:
        self._depth -= 1
        self._add("}")
