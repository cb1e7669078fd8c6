"""From a region to a kernel: the loop IR of what a group of nodes computes.

Values are made member by member; a tensor from outside is loaded at the coordinates of the member
that reads it. Then axes are put into the order in which memory runs, and those that all accesses
walk as one are merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Attribute
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.loops.group import Group
from fxkit.lower.loops.loop_ir import (
    Access,
    Buffer,
    Builder,
    Instruction,
    Kernel,
    Ref,
    Store,
    Unfusable,
    distinct_axes,
    register_of,
)
from fxkit.lower.loops.placement import (
    Candidate,
    operand_type,
    row_coordinates,
    row_dims,
    row_shape,
)
from fxkit.lower.loops.region_space import ONE, Coordinates, is_axis
from fxkit.lower.operators.row_ops import RowOp
from fxkit.lower.operators.scalar_table import Computes, ScalarOp

Operand = fx.Node | Attribute


@dataclass(frozen=True)
class Emitted:
    """A region's kernel and what it is called with.

    Attributes:
        kernel: The loop IR.
        inputs: Tensors from outside, in the order of the kernel's input buffers.
        outputs: What it writes, in the order of its output buffers: members of the region, each
            with the position of the result.
    """

    kernel: Kernel
    inputs: tuple[Operand, ...]
    outputs: tuple[tuple[fx.Node, int], ...]


def emit(group: Group, outputs: Sequence[tuple[fx.Node, int]], root: torch.nn.Module) -> Emitted:
    """Return the kernel of a region.

    Args:
        group: The region.
        outputs: Its results that are used outside.
        root: The module that owns the graph.
    """
    emitter = _Emitter(group, root)
    for member in group.members:
        emitter.compute(member)
    stores = [emitter.store(node, position) for node, position in outputs]
    kernel = _ordered(
        Kernel(
            group.space.sizes,
            0,
            tuple(emitter.buffers),
            tuple(emitter.builder.body),
            tuple(stores),
        ),
        sorted(group.space.reduced or ()),
    )
    return Emitted(kernel, tuple(emitter.inputs), tuple(outputs))


@dataclass
class _Emitter:
    group: Group
    root: torch.nn.Module
    builder: Builder = field(default_factory=Builder)
    buffers: list[Buffer] = field(default_factory=list)
    inputs: dict[Operand, int] = field(default_factory=dict)
    values: dict[fx.Node, tuple[Ref, ...]] = field(default_factory=dict)

    def compute(self, member: Candidate) -> None:
        if isinstance(member.row, RowOp):
            values = self._row(member, member.row)
        else:
            values = (self._scalar(member, member.row),)
        typed = zip(values, member.types, strict=True)
        self.values[member.node] = tuple(value.cast(known.dtype) for value, known in typed)

    def _scalar(self, member: Candidate, row: ScalarOp) -> Ref:
        dtype = self._compute_dtype(member, row)
        coordinates = self.group.coordinates[member.node]
        operands = [
            self._converted(name, value, row, dtype, coordinates)
            for name, value in member.operands.items()
        ]
        attributes = member.attributes
        if "result_dtype" in row.attributes:
            attributes["result_dtype"] = member.type.dtype
        return row.build(*operands, **attributes)

    def _compute_dtype(self, member: Candidate, row: ScalarOp) -> torch.dtype | None:
        if row.computes is Computes.RESULT:
            return member.type.dtype
        if row.computes is Computes.BOOL:
            return torch.bool
        if row.computes is Computes.OWN:
            return None
        return _common_dtype(self._meta(value) for value in member.operands.values())

    def _meta(self, value: Any) -> Any:
        """Return a tensor without memory that promotes as the operand does."""
        if not isinstance(value, (fx.Node, Attribute)):
            return value
        known = operand_type(value, self.root)
        return torch.empty((1,) * len(known.shape), dtype=known.dtype, device="meta")

    def _converted(
        self,
        name: str,
        value: Any,
        row: ScalarOp,
        dtype: torch.dtype | None,
        coordinates: Coordinates,
    ) -> Ref | None:
        """Return an operand in the dtype that the operator computes in."""
        if value is None:
            return None
        if not isinstance(value, (fx.Node, Attribute)):
            return self._number(value, dtype, row.exact_numbers)
        read = self._read(value, coordinates)
        if dtype is None or name in ("condition", "mask"):
            return read
        return read.cast(dtype)

    def _number(self, value: Any, dtype: torch.dtype | None, exact: bool) -> Ref:
        if dtype is None:
            raise Unfusable("it takes a number where a tensor is expected")
        return self.builder.const(value, register_of(dtype) if exact else dtype)

    def _row(self, member: Candidate, row: RowOp) -> tuple[Ref, ...]:
        group = self.group
        shape = row_shape(member, self.root)
        coordinates = row_coordinates(member, group.space, group.coordinates, self.root)
        dtypes = [operand_type(t, self.root).dtype for t in member.tensors]
        dtype = row.input_dtype(member.call.arguments, dtypes)
        lies = row_dims(member, self.root)
        operands: list[Ref | None] = []
        for name, value in member.operands.items():
            if name in lies:
                read = self._read(value, tuple(coordinates[d] for d in lies[name]))
                operands.append(read.cast(dtype))
            else:
                operands.append(None if value is None else self.builder.const(value, dtype))
        attributes = member.attributes
        dims = row.axes(member.call.arguments, len(shape))
        attributes["count"] = math.prod(shape[d] for d in dims)
        attributes["sizes"] = shape
        attributes["result_dtype"] = member.type.dtype
        if "place" in row.attributes:
            attributes["place"] = self._number_in_row([coordinates[d] for d in dims])
        result = row.build(*operands, **{name: attributes.get(name) for name in row.attributes})
        return result if isinstance(result, tuple) else (result,)

    def _number_in_row(self, coordinates: Sequence[int | None]) -> Ref:
        """Return the number of an element within its row, counted through dimensions in order."""
        strides = [0] * len(self.group.space.sizes)
        below = 1
        for coordinate in reversed(coordinates):
            if coordinate is not None and is_axis(coordinate):
                strides[coordinate] = below
                below *= self.group.space.sizes[coordinate]
        return self.builder.index(strides)

    def _read(self, operand: Operand, coordinates: Coordinates) -> Ref:
        """Return an operand's element at the coordinates of the value that reads it."""
        if isinstance(operand, fx.Node) and operand in self.group.coordinates:
            member, position = self.group.origin(operand)
            return self.values[member][position]
        known = operand_type(operand, self.root)
        if operand not in self.inputs:
            self.inputs[operand] = len(self.buffers)
            self.buffers.append(Buffer(f"in{len(self.inputs) - 1}", known.dtype, False))
        return self.builder.load(
            self._access(self.inputs[operand], known, coordinates), known.dtype
        )

    def _access(self, buffer: int, known: TensorType, coordinates: Coordinates) -> Access:
        """Return the address of a tensor that is aligned with `coordinates` from the right."""
        strides = [0] * len(self.group.space.sizes)
        lead = len(coordinates) - len(known.shape)
        aligned = coordinates[lead:] if lead >= 0 else (ONE,) * -lead + tuple(coordinates)
        for coordinate, size, stride in zip(aligned, known.shape, known.stride or (), strict=True):
            if size != 1 and coordinate is not None and is_axis(coordinate):
                strides[coordinate] = stride
        return Access(buffer, tuple(strides))

    def store(self, node: fx.Node, position: int) -> Store:
        known = result_type(node, position)
        buffer = len(self.buffers)
        self.buffers.append(Buffer(f"out{buffer - len(self.inputs)}", known.dtype, True))
        access = self._access(buffer, known, self.group.results[node][position])
        return Store(access, self.values[node][position].position)


def _common_dtype(values: Iterable[Any]) -> torch.dtype:
    """Return what operands promote to: tensors without memory, and numbers."""
    common: Any = None
    for value in values:
        if value is None:
            continue
        if common is None:
            common = value
            continue
        dtype = torch.result_type(common, value)
        rank = max(getattr(v, "ndim", 0) for v in (common, value))
        common = torch.empty((1,) * rank, dtype=dtype, device="meta")
    return torch.result_type(common, common)


def _ordered(kernel: Kernel, reduced: Sequence[int]) -> Kernel:
    """Order the axes as memory runs, the reduced ones last, and merge those that run as one."""
    accesses = _accesses(kernel)
    guide = max((s.access for s in kernel.stores), key=lambda a: sum(1 for s in a.strides if s))
    in_memory = [a for a in accesses if a.buffer >= 0]
    loads = [a for a in in_memory if all(a.strides[axis] for axis in reduced)] or [guide]

    def by_stride(axes: Iterable[int], access: Access) -> list[int]:
        return sorted(axes, key=lambda axis: -abs(access.strides[axis]))

    outer = by_stride((a for a in range(len(kernel.sizes)) if a not in reduced), guide)
    groups = _merged(kernel, outer, accesses)
    rows = _merged(kernel, by_stride(reduced, loads[0]), accesses)
    if len(rows) > 1 and any(i.is_scan for i in kernel.body):
        raise Unfusable("it folds along an axis that its neighbours walk as two")
    return _regrouped(kernel, groups, rows)


def _accesses(kernel: Kernel) -> list[Access]:
    loads = [i.detail for i in kernel.body if i.op in ("load", "index")]
    return loads + [s.access for s in kernel.stores]


def _merged(kernel: Kernel, axes: Sequence[int], accesses: Sequence[Access]) -> list[list[int]]:
    strides = [[a.strides[axis] for axis in axes] for a in accesses]
    found = distinct_axes(strides, [kernel.sizes[axis] for axis in axes])
    return [[axes[position] for position in group] for group in found]


def _regrouped(kernel: Kernel, outer: list[list[int]], rows: list[list[int]]) -> Kernel:
    groups = outer + rows

    def access(old: Access) -> Access:
        return replace(old, strides=tuple(old.strides[group[-1]] for group in groups))

    def instruction(old: Instruction) -> Instruction:
        if old.op not in ("load", "index"):
            return old
        return replace(old, detail=access(old.detail))

    sizes = []
    for group in groups:
        size = 1
        for axis in group:
            size *= kernel.sizes[axis]
        sizes.append(size)
    return Kernel(
        tuple(sizes),
        len(rows),
        kernel.buffers,
        tuple(instruction(i) for i in kernel.body),
        tuple(Store(access(s.access), s.value) for s in kernel.stores),
    )


def result_type(node: fx.Node, position: int) -> TensorType:
    """Return the type of one of a node's results."""
    known = type_of(node)
    return known[position] if isinstance(known, tuple) else known
