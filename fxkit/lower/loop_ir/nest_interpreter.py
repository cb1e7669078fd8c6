"""What a loop nest computes, by torch: each pass over a nest is held to the kernel's own meaning.

Serial loops run one iteration after the other. Blocks, threads and lanes are dimensions of the
tensors that stand for index variables, values and local arrays, and a mask says which of them run a
statement, so all threads are in step. It is slow and plain, and shares nothing with the printers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fxkit.errors import InvalidGraphError
from fxkit.lower.loop_ir.index_expressions import IndexValue, value_of
from fxkit.lower.loop_ir.interpreter import flat_memory, scalar_value
from fxkit.lower.loop_ir.loop_ir import Access
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.monoids import FOLDS, neutral_element
from fxkit.lower.loop_ir.nest_statements import (
    LANE,
    PARTIAL,
    SPLIT,
    Accumulate,
    Allocate,
    Compute,
    Define,
    For,
    If,
    InitAccumulator,
    LoopKind,
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
from fxkit.lower.loop_ir.scalar_functions import SCALAR_FUNCTIONS


def interpret_nest(
    nest: LoopNest, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> bool:
    """Compute a loop nest.

    Args:
        nest: The nest.
        inputs: A tensor for each input buffer of its kernel, with the layout that it was made for.
        outputs: A tensor for each of its output buffers, which is written.

    Returns:
        Whether all checks hold; where not, what it wrote is void.

    Raises:
        IndexError: When a load or a store leaves its tensor.
        InvalidGraphError: When an element is stored twice, or threads fold without each other.
    """
    machine = _Machine(nest, [flat_memory(t) for t in (*inputs, *outputs)])
    machine.run(nest.body)
    return machine.holds


class _Machine:
    def __init__(self, nest: LoopNest, memory: list[torch.Tensor]) -> None:
        self._nest, self._kernel = nest, nest.kernel
        self._memory = memory
        kinds = [kind for kind in LoopKind if kind.is_parallel]
        names = dict.fromkeys([*(loop.var for loop in loops_of(nest.body, *kinds)), LANE])
        self._dims = {name: position for position, name in enumerate(names)}
        self._rank = len(self._dims)
        self._shape = [1] * self._rank
        self._mask = torch.ones(self._shape, dtype=torch.bool)
        self._indices: dict[str, Any] = {}
        self._arrays: dict[str, Allocate] = {}
        self._elements: dict[tuple[Any, ...], torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._written = [torch.zeros(len(m), dtype=torch.bool) for m in memory]
        rows = 1
        for size in self._kernel.outer_sizes:
            rows *= size
        self._partials = {
            p.name: torch.zeros(p.splits * rows, dtype=p.dtype) for p in nest.partials
        }
        self.holds = True

    def run(self, body: Iterable[Statement]) -> None:
        for statement in body:
            self._run(statement)

    def _run(self, statement: Statement) -> None:
        match statement:
            case For():
                self._loop(statement)
            case If(condition, body):
                with self._masked(self._index(condition)):
                    self.run(body)
            case Define(name, value):
                self._indices[name] = self._index(value)
            case Allocate(name, _, axes):
                is_in_lanes = self._shape[self._dims[LANE]] > 1
                within = (*axes, LANE) if is_in_lanes and LANE not in axes else axes
                self._arrays[name] = replace(statement, axes=within)
            case Compute(value, source):
                self._values[value] = self._computed(value, source)
            case StoreLocal(array, value):
                self._set(array, self._value(value))
            case Write(store, None):
                self._store(store, self._value(self._kernel.stores[store].value))
            case Write(store, array):
                self._set(str(array), self._value(self._kernel.stores[store].value))
            case VectorLoad(value, lanes):
                with self._lanes(lanes.extent, lanes.axis, lanes.count):
                    self._set(lanes.array, self._read(value))
            case VectorStore(store, lanes):
                with self._lanes(lanes.extent, lanes.axis, lanes.count):
                    self._store(store, self._get(lanes.array))
            case InitAccumulator(reduction, array):
                monoid, dtype = self._monoid(reduction), self._arrays[array].dtype
                number = neutral_element(monoid, dtype)
                self._set(array, torch.full([1] * self._rank, number, dtype=dtype))
            case Accumulate():
                self._accumulate(statement)
            case ReduceThreads():
                self._reduce_threads(statement)
            case Scan(value, array):
                self._scan(value, array)
            case ScanThreads():
                self._scan_threads(statement)
            case StorePartial(partial, array):
                self._partials[partial][self._partial_places(partial)] = self._active(
                    self._get(array)
                )
            case _:
                pass

    # Loops.

    def _loop(self, loop: For) -> None:
        if loop.kind is LoopKind.LANES:
            assert loop.axis is not None
            with self._lanes(loop.extent, loop.axis, loop.count):
                self.run(loop.body)
            return
        if loop.kind is LoopKind.BLOCK:
            self._elements, self._values = {}, {}
        if loop.kind.is_parallel:
            if loop.end:
                with self._dimension(loop.var, loop.extent):
                    self.run(loop.body)
            return
        begin, end = self._index(loop.begin), self._index(loop.end)
        while True:
            is_there = torch.as_tensor(begin < end)
            if not bool((is_there & self._mask).any()):
                return
            self._indices[loop.var] = begin
            with self._masked(is_there):
                self.run(loop.body)
            begin = begin + loop.step

    @contextmanager
    def _dimension(self, name: str, size: int) -> Iterator[None]:
        """Make the iterations of a parallel loop a dimension."""
        dim = self._dims[name]
        shape, known = list(self._shape), self._indices.get(name)
        self._shape[dim] = size
        self._indices[name] = torch.arange(size).view([size if d == dim else 1 for d in self._all])
        yield
        self._shape = shape
        self._indices[name] = known

    @property
    def _all(self) -> range:
        return range(self._rank)

    @contextmanager
    def _lanes(self, count: int, axis: int, there: IndexValue | None) -> Iterator[None]:
        """Make neighbours along an axis a dimension, masked where they are not there."""
        name = self._nest.axes[axis]
        first = self._indices[name]
        with self._dimension(LANE, count):
            lane = self._indices[LANE]
            self._indices[name] = first + lane
            with self._masked(True if there is None else lane < self._index(there)):
                yield
        self._indices[name] = first

    @contextmanager
    def _masked(self, condition: Any) -> Iterator[None]:
        mask = self._mask
        self._mask = mask & torch.as_tensor(condition, dtype=torch.bool)
        yield
        self._mask = mask

    def _index(self, value: IndexValue) -> Any:
        return value_of(value, self._indices)

    # Local arrays: an element for each iteration of serial loops, a tensor over the parallel ones.

    def _key(self, name: str) -> tuple[Any, ...]:
        serial = [axis for axis in self._arrays[name].axes if axis not in self._dims]
        return (name, *(int(self._indices[axis]) for axis in serial))

    def _get(self, name: str) -> torch.Tensor:
        return self._elements[self._key(name)]

    def _set(self, name: str, value: torch.Tensor) -> None:
        key, value = self._key(name), value.to(self._arrays[name].dtype)
        old = self._elements.get(key, torch.zeros((), dtype=value.dtype))
        self._elements[key] = torch.where(self._mask, value, old)

    # Values.

    def _value(self, position: int) -> torch.Tensor:
        instruction = self._kernel.body[position]
        if instruction.op == "const":
            number = instruction.detail.value
            return torch.full([1] * self._rank, number, dtype=instruction.dtype)
        return self._values[position]

    def _computed(self, position: int, source: str | None) -> torch.Tensor:
        instruction = self._kernel.body[position]
        if source is not None:
            held = self._get(source).to(instruction.dtype)
            if instruction.op != "load" or instruction.guard is None:
                return held
            otherwise = torch.tensor(instruction.detail.otherwise.value, dtype=held.dtype)
            return torch.where(self._value(instruction.guard), held, otherwise)
        if instruction.op == "load":
            return self._read(position).to(instruction.dtype)
        if instruction.op == "index":
            return torch.as_tensor(self._address(instruction.detail)).to(instruction.dtype)
        operands = [self._value(o) for o in instruction.operands]
        if instruction.op == "check":
            self.holds = self.holds and bool((operands[0] | ~self._mask).all())
            return operands[0]
        return scalar_value(instruction, operands)

    def _pure(self, position: int) -> torch.Tensor:
        """Return a condition at the present lanes; one on indices may not have been computed."""
        instruction = self._kernel.body[position]
        if instruction.op == "index":
            return torch.as_tensor(self._address(instruction.detail))
        if instruction.op in SCALAR_FUNCTIONS:
            return scalar_value(instruction, [self._pure(o) for o in instruction.operands])
        return self._value(position)

    def _read(self, position: int) -> torch.Tensor:
        """Return what memory holds where a load reads it, in the buffer's dtype."""
        instruction = self._kernel.body[position]
        memory, access = self._memory[instruction.detail.buffer], instruction.detail
        operands = [self._value(o) for o in instruction.indices]
        where = torch.as_tensor(self._address(access, operands))
        there = self._mask
        if instruction.guard is not None:
            there = there & self._pure(instruction.guard)
        where, there = torch.broadcast_tensors(where, there)
        otherwise = 0 if access.otherwise is None else access.otherwise.value
        result = torch.full(where.shape, otherwise, dtype=instruction.dtype).to(memory.dtype)
        result[there] = memory[self._checked(where[there], len(memory))]
        return result

    def _address(self, access: Access, indices: Sequence[torch.Tensor] = ()) -> Any:
        result: Any = access.offset
        for axis, stride in zip(self._nest.axes, access.strides, strict=True):
            if stride:
                result = result + self._indices[axis] * stride
        for index, scale in zip(indices, access.scales, strict=True):
            result = result + index * scale
        return result

    # Memory.

    def _store(self, position: int, value: torch.Tensor) -> None:
        access = self._kernel.stores[position].access
        memory, written = self._memory[access.buffer], self._written[access.buffer]
        where = self._active(torch.as_tensor(self._address(access)))
        self._checked(where, len(memory))
        if bool(written[where].any()) or len(where.unique()) != len(where):
            raise InvalidGraphError(
                f"expected one store of each element, got several by "
                f"{self._kernel.store_line(position)}"
            )
        written[where] = True
        memory[where] = self._active(value.to(memory.dtype))

    def _checked(self, where: torch.Tensor, size: int) -> torch.Tensor:
        if bool(((where < 0) | (where >= size)).any()):
            raise IndexError(f"expected addresses in [0, {size}), got {where.unique()}")
        return where

    def _active(self, value: torch.Tensor) -> torch.Tensor:
        """Return the elements of all blocks, threads and lanes that run."""
        return value.expand(self._shape)[self._mask.expand(self._shape)]

    def _partial_index(self, split: str) -> Any:
        number: Any = self._indices[split]
        for axis, size in enumerate(self._kernel.outer_sizes):
            number = number * size + self._indices[self._nest.axes[axis]]
        return torch.as_tensor(number)

    def _partial_places(self, name: str) -> torch.Tensor:
        return self._checked(self._active(self._partial_index(SPLIT)), len(self._partials[name]))

    # Reductions.

    def _monoid(self, reduction: int) -> str:
        return self._kernel.body[reduction].monoid

    def _accumulate(self, statement: Accumulate) -> None:
        array, dtype = statement.array, self._arrays[statement.array].dtype
        operand = self._operand(statement).to(dtype)
        self._fold_in(self._monoid(statement.reduction), array, operand)

    def _fold_in(self, monoid: str, array: str, operand: torch.Tensor) -> torch.Tensor:
        """Fold a value into an array, lanes in order; return what each lane has come to."""
        fold, dim, mask = FOLDS[monoid], self._dims[LANE], self._mask
        lanes = self._shape[dim]
        if lanes == 1 or LANE in self._arrays[array].axes:
            self._set(array, fold(self._get(array), operand))
            return self._get(array)
        found = []
        for lane in range(lanes):
            one, there = (
                (x.narrow(dim, lane, 1) if x.shape[dim] == lanes else x) for x in (operand, mask)
            )
            self._mask = there
            self._set(array, fold(self._get(array), one))
            found.append(self._get(array))
        self._mask = mask
        return torch.cat(found, dim)

    def _scan(self, value: int, array: str) -> None:
        instruction = self._kernel.body[value]
        operand = self._value(instruction.operands[0]).to(self._arrays[array].dtype)
        self._values[value] = self._fold_in(instruction.monoid, array, operand)

    def _scan_threads(self, statement: ScanThreads) -> None:
        if not bool(self._mask.all()):
            raise InvalidGraphError(f"expected all threads at a scan over {statement.loop!r}")
        dim, fold = self._dims[statement.loop], FOLDS[self._monoid(statement.value)]
        own, carry = self._get(statement.array), self._get(statement.carry)
        threads = self._shape[dim]
        own = own.expand([threads if d == dim else n for d, n in enumerate(own.shape)])
        before, carry = [], carry.narrow(dim, 0, 1)
        for thread in range(threads):
            before.append(carry)
            carry = fold(carry, own.narrow(dim, thread, 1))
        shapes = torch.broadcast_shapes(*(one.shape for one in before))
        self._set(statement.array, torch.cat([one.expand(shapes) for one in before], dim))
        self._set(statement.carry, carry)

    def _operand(self, statement: Accumulate) -> torch.Tensor:
        source = statement.source
        if source is None:
            operand = self._value(self._kernel.body[statement.reduction].operands[0])
            return operand.expand(torch.broadcast_shapes(operand.shape, self._mask.shape))
        if source in self._arrays:
            return self._get(source)
        memory = self._partials[source]
        where = torch.where(self._mask, self._partial_index(PARTIAL), 0)
        return memory[self._checked(where, len(memory))]

    def _reduce_threads(self, statement: ReduceThreads) -> None:
        if not bool(self._mask.all()):
            raise InvalidGraphError(
                f"expected all threads at a fold over {statement.loop!r}, got only some"
            )
        dim, array = self._dims[statement.loop], statement.array
        fold = FOLDS[self._monoid(statement.reduction)]
        value = self._get(array)
        sizes = [self._shape[d] if d == dim else n for d, n in enumerate(value.shape)]
        value = value.expand(sizes)
        while value.shape[dim] > 1:
            half = value.shape[dim] // 2
            value = fold(value.narrow(dim, 0, half), value.narrow(dim, half, half))
        self._set(array, value)
