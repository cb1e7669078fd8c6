"""A loop nest whose loops are blocks, threads, lanes and serial loops → functions for a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.kernel_printer import scaled
from fxkit.lower.codegen.cpp.lines import Lines
from fxkit.lower.codegen.cuda.text import WRAPPING
from fxkit.lower.loop_ir.index_expressions import IndexExpr, IndexValue, text_of
from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    LANE,
    PARTIAL,
    SPLIT,
    Accumulate,
    Allocate,
    Block,
    Compute,
    Define,
    For,
    If,
    InitAccumulator,
    LoopKind,
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
    loops_of,
)

# Addresses up to here are computed in 32 bits; what lies above is room for the last step of a loop.
_SMALL = 2**31 - 2**25

FOLDS = {"add": "FxAdd", "mul": "FxMul", "max": "FxMax", "min": "FxMin"}


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


class CudaNestPrinter(Lines):
    """Writes a nest as functions, one for each of its loops over blocks.

    In the text, index variables have their names in the nest; `v3` is the value of instruction 3,
    `d3` what is divided by it, and local arrays are named as in the nest.

    Args:
        nest: The nest, scheduled for a GPU.
        name: Name of the function, or what the names of several begin with.
    """

    def __init__(self, nest: LoopNest, name: str) -> None:
        super().__init__()
        self._nest, self._kernel, self._name = nest, nest.kernel, name
        self._index = index_type(nest.kernel)
        self._arrays: dict[str, Allocate] = {}
        self._defined: frozenset[int] = frozenset()  # values, where the text has come to
        self._partials = {partial.name: partial for partial in nest.partials}
        kinds = (LoopKind.THREAD, LoopKind.LANES, LoopKind.UNROLLED)
        self._extents = {loop.var: loop.extent for loop in loops_of(nest.body, *kinds)}
        self._innermost = ""
        self._inverted: set[int] = set()
        self._lanes: For | None = None

    def launches(self) -> list[Launch]:
        """Return the functions and how they are launched, one after the other."""
        grids = loops_of(self._nest.body, LoopKind.BLOCK)
        names = [self._name] if len(grids) == 1 else [f"{self._name}_launch{n}" for n in range(99)]
        return [self._launch(grid, name) for grid, name in zip(grids, names, strict=False)]

    def _launch(self, grid: For, name: str) -> Launch:
        self._arrays, self._inverted = {}, set()
        splits = loops_of((grid,), LoopKind.SPLIT)
        loops = loops_of((grid,), LoopKind.THREAD)
        self._innermost = loops[-1].var if loops else ""
        threads = 1
        for loop in loops:
            threads *= loop.extent
        self._open_function(name, threads)
        body: Block = grid.body
        self._define(grid.var, "blockIdx.x")
        for loop in splits:
            self._define(loop.var, "blockIdx.y")
            body = loop.body
        below = threads
        for loop in loops:
            below //= loop.extent
            number = "threadIdx.x" if below == 1 else f"threadIdx.x / {below}"
            is_part = below * loop.extent < threads
            self._define(loop.var, f"{number} % {loop.extent}" if is_part else number)
            body = loop.body
        self._block(body)
        self._close()
        down = splits[0].extent if splits else 1
        return Launch(name, grid.extent, down, threads, self._taken())

    def _define(self, name: str, place: str) -> None:
        self._add(f"const {self._index} {name} = ({self._index}){place};")

    def _open_function(self, name: str, threads: int) -> None:
        parts = [
            f"{'' if b.is_output else 'const '}{cpp_text.TYPES[b.dtype]}* __restrict__ {b.name}"
            for b in self._kernel.buffers
        ]
        parts += ["char* scratch"] if self._partials else []
        # That one block at a time is enough lets the compiler use the registers that it needs.
        self._add(f'extern "C" __global__ void __launch_bounds__({threads}, 1)')
        self._open(f"{name}({', '.join(parts)}) {{")

    # Statements.

    def _block(self, body: Block) -> None:
        arrays, defined = dict(self._arrays), self._defined
        for statement in body:
            self._statement(statement)
        self._arrays, self._defined = arrays, defined

    def _statement(self, statement: Statement) -> None:
        match statement:
            case For(kind=LoopKind.LANES):
                self._lane_loop(statement)
            case For():
                self._loop(statement)
            case If(condition, body):
                self._open(f"if ({text_of(condition)}) {{")
                self._block(body)
                self._close()
            case Define(name, value):
                is_condition = isinstance(value, IndexExpr) and value.is_condition
                kind = "bool" if is_condition else self._index
                self._add(f"const {kind} {name} = {text_of(value)};")
            case Allocate(name, dtype):
                self._arrays[name] = statement
                sizes = "".join(f"[{self._extents[axis]}]" for axis in statement.axes)
                self._add(f"{cpp_text.TYPES[dtype]} {name}{sizes};")
            case Compute(value, source):
                self._compute(value, source)
            case StoreLocal(array, value):
                self._add(f"{self._element(array)} = {self._ref(value)};")
            case Write(store, array):
                self._write(store, array)
            case VectorLoad():
                self._vector_load(statement)
            case VectorStore(store, lanes):
                pointer = self._pointer(self._kernel.stores[store].access)
                self._add(f"fx_store({pointer}, {lanes.array}{_counted(lanes.count)});")
            case InitAccumulator(reduction, array):
                dtype = self._arrays[array].dtype
                neutral = cpp_text.identity_of(self._monoid(reduction), dtype)
                self._add(f"{self._element(array)} = {neutral};")
            case Accumulate():
                self._accumulate(statement)
            case ReduceThreads(reduction, array, loop):
                self._reduce_threads(reduction, array, loop)
            case Scan(value, array):
                self._accumulate(Accumulate(value, array))
                self._assign(value, self._element(array))
            case ScanThreads(value, array, carry, loop):
                fold, size = FOLDS[self._monoid(value)], self._extents[loop]
                self._add(f"fx_scan<{size}, {fold}>({array}, {carry});")
            case StorePartial(partial, array):
                self._add(
                    f"{self._if_there}{self._partial(partial, SPLIT)} = {self._element(array)};"
                )
            case PrecomputeReciprocal(value):
                self._inverted.add(value)
                self._add(f"const FxDivisor d{value} = fx_divisor(v{value});")

    def _loop(self, loop: For) -> None:
        if loop.kind is LoopKind.UNROLLED:
            self._add("#pragma unroll")
        elif loop.unroll:
            self._add(f"#pragma unroll {loop.unroll}")
        kind = "int" if loop.kind is LoopKind.UNROLLED else self._index
        step = f"++{loop.var}" if loop.step == 1 else f"{loop.var} += {loop.step}"
        bounds = f"{kind} {loop.var} = {text_of(loop.begin)}; {loop.var} < {text_of(loop.end)}"
        self._open(f"for ({bounds}; {step}) {{")
        self._block(loop.body)
        self._close()

    def _lane_loop(self, loop: For) -> None:
        self._lanes = loop
        self._add("#pragma unroll")
        self._open(f"for (int {loop.var} = 0; {loop.var} < {loop.end}; ++{loop.var}) {{")
        self._block(loop.body)
        self._close()
        self._lanes = None

    def _element(self, array: str) -> str:
        return array + "".join(f"[{axis}]" for axis in self._arrays[array].axes)

    def _compute(self, value: int, source: str | None) -> None:
        self._assign(
            value, self._value(value) if source is None else self._taken_from(value, source)
        )

    def _assign(self, value: int, text: str) -> None:
        if f"v{value}" in self._arrays:
            self._add(f"{self._element(f'v{value}')} = {text};")
        else:
            self._add(f"const {self._type(value)} v{value} = {text};")
            self._defined |= {value}

    def _taken_from(self, value: int, source: str) -> str:
        """Return a value that a local array holds."""
        instruction, element = self._body(value), self._element(source)
        dtype = self._arrays[source].dtype
        if instruction.op == "load" and source.startswith("m"):
            text = cpp_text.load_expression(element, dtype)
            if instruction.guard is None:
                return text
            otherwise = cpp_text.literal(instruction.detail.otherwise.value, instruction.dtype)
            return f"{self._ref(instruction.guard)} ? {text} : {otherwise}"
        return element if dtype == instruction.dtype else f"({self._type(value)}){element}"

    def _write(self, position: int, array: str | None) -> None:
        store = self._kernel.stores[position]
        buffer = self._kernel.buffers[store.access.buffer]
        value, instruction = store.value, self._body(store.value)
        if instruction.op == "round" and instruction.detail == buffer.dtype:
            # What a store rounds itself; that may be known where the rounded value was made only.
            (whole,) = instruction.operands
            value = whole if whole in self._defined or f"v{whole}" in self._arrays else value
        text = cpp_text.store_expression(self._ref(value), buffer.dtype)
        if array is not None:
            self._add(f"{self._element(array)} = {text};")
            return
        self._add(f"{self._if_there}{buffer.name}[{self._place(store.access)}] = {text};")

    def _vector_load(self, load: VectorLoad) -> None:
        access, guard = self._body(load.value).detail, self._body(load.value).guard
        condition = "" if guard is None else f"if ({self._condition(guard)}) "
        pointer = self._pointer(access)
        self._add(f"{condition}fx_load({load.lanes.array}, {pointer}{_counted(load.lanes.count)});")

    def _condition(self, position: int) -> str:
        """Return the text of a condition that is the same for all lanes."""
        instruction = self._body(position)
        if instruction.op == "index":
            return f"({' + '.join(self._terms(instruction.detail)) or '0'})"
        operands = [self._condition(o) for o in instruction.operands]
        return f"({self._expression(instruction, operands)})"

    # Reductions.

    def _accumulate(self, statement: Accumulate) -> None:
        element, source = self._element(statement.array), statement.source
        dtype = self._arrays[statement.array].dtype
        if source is None:
            operand = self._body(statement.reduction).operands[0]
            text, given = self._ref(operand), self._body(operand).dtype
        elif source in self._arrays:
            text, given = self._element(source), self._arrays[source].dtype
        else:
            text, given = self._partial(source, PARTIAL), dtype
        text = text if given == dtype else f"({cpp_text.TYPES[dtype]}){text}"
        fold = FOLDS[self._monoid(statement.reduction)]
        self._add(f"{self._if_there}{element} = {fold}::of({element}, {text});")

    def _reduce_threads(self, reduction: int, array: str, loop: str) -> None:
        fold = FOLDS[self._monoid(reduction)]
        size = self._extents[loop]
        if loop == self._innermost:
            self._add(f"{array} = fx_fold<{size}, {fold}>({array});")
        elif self._arrays[array].axes:
            self._add(f"fx_fold_down<{size}, {fold}>({array});")
        else:
            self._add(f"{array} = fx_fold_one_down<{size}, {fold}>({array});")

    def _partial(self, name: str, split: str) -> str:
        """Return the text of what one of the blocks that share a row leaves of a reduction."""
        partial = self._partials[name]
        below, sizes = 1, self._kernel.outer_sizes
        terms: list[str] = []
        for axis in reversed(range(len(sizes))):
            terms.insert(0, scaled(self._nest.axes[axis], below))
            below *= sizes[axis]
        lane = [LANE] if self._lanes is not None else []
        where = " + ".join([scaled(f"(long){split}", below), *terms, *lane])
        kind = cpp_text.TYPES[partial.dtype]
        return f"(({kind}*)(scratch + {partial.offset}L))[{where}]"

    # Values.

    @property
    def _if_there(self) -> str:
        """What keeps a statement to the lanes that are there."""
        has_count = self._lanes is not None and self._lanes.count is not None
        return f"if ({LANE} < count) " if has_count else ""

    def _value(self, position: int) -> str:
        instruction = self._body(position)
        if instruction.op == "index":
            return self._place(instruction.detail)
        operands = [self._ref(o) for o in instruction.operands]
        if instruction.op == "load":
            return self._loaded(instruction, operands)
        if instruction.op == "check":
            return f"{f'{LANE} >= count || ' if self._if_there else ''}fx_check({operands[0]})"
        if instruction.op == "round":
            return cpp_text.rounding(operands[0], instruction.detail)
        if instruction.op == "div" and instruction.dtype == torch.float32:
            divisor = instruction.operands[1]
            if divisor in self._inverted:
                return f"fx_quotient({operands[0]}, d{divisor})"
            if self._body(divisor).op == "const":
                return f"fx_quotient({operands[0]}, fx_divisor({operands[1]}))"
        return self._expression(instruction, operands)

    def _expression(self, instruction: Instruction, operands: list[str]) -> str:
        if instruction.op in WRAPPING and instruction.dtype in (torch.int32, torch.int64):
            return f"fx_{instruction.op}({', '.join(operands)})"
        source = self._body(instruction.operands[0]).dtype if operands else instruction.dtype
        return cpp_text.expression(instruction, operands, source)

    def _loaded(self, instruction: Instruction, operands: list[str]) -> str:
        access: Access = instruction.detail
        buffer = self._kernel.buffers[access.buffer]
        terms = [scaled(n, s) for n, s in zip(operands, access.scales, strict=False)]
        where = " + ".join([self._place(access), *terms])
        text = cpp_text.load_expression(f"{buffer.name}[{where}]", buffer.dtype)
        conditions = [f"{LANE} < count"] if self._if_there else []
        otherwise = cpp_text.literal(0, instruction.dtype)
        if access.otherwise is not None:
            conditions.append(operands[-1])
            otherwise = cpp_text.literal(access.otherwise.value, instruction.dtype)
        return f"{' && '.join(conditions)} ? {text} : {otherwise}" if conditions else text

    def _ref(self, position: int) -> str:
        """Return the text that stands for a value."""
        instruction = self._body(position)
        if instruction.op == "const":
            return cpp_text.literal(instruction.detail.value, instruction.dtype)
        name = f"v{position}"
        return self._element(name) if name in self._arrays else name

    # Addresses.

    def _place(self, access: Access) -> str:
        """Return the text of an address, in elements, of one point."""
        step = 0 if self._lanes is None else access.strides[self._lanes.axis or 0]
        lane = [scaled(LANE, step)] if step else []
        return " + ".join([*self._terms(access), *lane]) or "0"

    def _pointer(self, access: Access) -> str:
        """Return the text of the address of the first lane's element."""
        return " + ".join([self._kernel.buffers[access.buffer].name, *self._terms(access)])

    def _terms(self, access: Access) -> list[str]:
        names = zip(self._nest.axes, access.strides, strict=True)
        terms = [scaled(name, step) for name, step in names if step]
        return [*terms, str(access.offset)] if access.offset else terms

    def _monoid(self, reduction: int) -> str:
        return self._body(reduction).monoid

    def _body(self, position: int) -> Instruction:
        return self._kernel.body[position]

    def _type(self, position: int) -> str:
        return cpp_text.TYPES[self._body(position).dtype]


def _counted(count: IndexValue | None) -> str:
    return "" if count is None else f", (int){text_of(count)}"


def index_type(kernel: Kernel) -> str:
    """Return the type in which indices and addresses are computed."""
    accesses = [i.detail for i in kernel.body if i.op in ("load", "index")]
    accesses += [s.access for s in kernel.stores]
    spans = [
        abs(a.offset)
        + sum(abs(step) * size for step, size in zip(a.strides, kernel.sizes, strict=True))
        for a in accesses
    ]
    return "int" if max([kernel.points, *spans]) < _SMALL else "long"
