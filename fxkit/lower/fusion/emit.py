"""From a region to a kernel: the loop IR of what a group of nodes computes.

A value is made where it is read: at an index that is linear in the axes. Views only change that
index, and a tensor from outside is loaded at it. A value that is read at several indices is made
for each of them. Then axes are put into the order in which memory runs, and those that all accesses
walk as one are merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Attribute
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.fusion.candidates import Candidate, position_taken
from fxkit.lower.fusion.column_sums import sum_dtype_of
from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.fusion.moved_results import Moved, moved_axes
from fxkit.lower.fusion.placement import (
    domain_of,
    only_type_matters,
    row_coordinates,
    row_dims,
    row_shape,
)
from fxkit.lower.fusion.point import EmittedPoint
from fxkit.lower.fusion.view_map import ViewMap, view_map
from fxkit.lower.fusion.walked_axes import WalkedAxes, split
from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.index import Index, SplitAxis
from fxkit.lower.loop_ir.loop_ir import (
    Access,
    Buffer,
    Instruction,
    Kernel,
    Store,
    Unfusable,
    register_of,
)
from fxkit.lower.operators.movement_table import MoveOp
from fxkit.lower.operators.reduction_ops import ReductionOp
from fxkit.lower.operators.scalar_table import Computes, ScalarOp
from fxkit.lower.scheduling.axis_order import ordered

Operand = fx.Node | Attribute

# A region that asks for more axes to be walked as two is left alone.
MAX_SPLITS = 16

# Eager rounds the number of a sum to a half before it is added. Where a sum is not rounded either,
# the number stays as it is: one that is too small for a half may keep a logarithm finite.
_SUMS = frozenset({"aten.add", "aten.sub", "aten.rsub"})


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


def emit(group: FusionGroup, outputs: Sequence[tuple[fx.Node, int]]) -> Emitted:
    """Return the kernel of a region.

    Args:
        group: The region.
        outputs: Its results that are used outside.
    """
    factors = [[size] for size in group.space.sizes]
    for _ in range(MAX_SPLITS):
        try:
            return _emitted(group, outputs, factors)
        except SplitAxis as wanted:
            split(factors, wanted)
    raise Unfusable("it regroups dimensions in too many ways")


def _emitted(
    group: FusionGroup,
    outputs: Sequence[tuple[fx.Node, int]],
    factors: list[list[int]],
) -> Emitted:
    emitter = _Emitter(group, factors)
    for member in group.members:
        if group.coordinates.get(member.node) is not None:
            emitter.compute(member)
    values = [emitter.stored(node, position) for node, position in outputs]
    stores = [emitter.store(*output, value) for output, value in zip(outputs, values, strict=True)]
    kernel = ordered(
        Kernel(
            tuple(emitter.sizes),
            0,
            tuple(emitter.buffers),
            tuple(emitter.builder.body),
            tuple(stores),
        ),
        emitter.axes.of(group.space.reduced or ()),
    )
    return Emitted(kernel, tuple(emitter.inputs), tuple(outputs))


@dataclass
class _Emitter:
    """Makes the body of a kernel, each value where it is read.

    Attributes:
        group: The region.
        factors: For each axis of the region's space, the sizes of the axes that walk it.
        guard: Where memory may be touched at present; None for everywhere.
    """

    group: FusionGroup
    factors: list[list[int]]
    builder: Builder = field(default_factory=Builder)
    guard: Ref | None = None
    buffers: list[Buffer] = field(default_factory=list)
    inputs: dict[Operand, int] = field(default_factory=dict)
    values: dict[Any, tuple[Ref, ...]] = field(default_factory=dict)
    views: dict[fx.Node, ViewMap] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = WalkedAxes(self.group.space, self.factors)
        self.sizes = self.axes.sizes
        self._members = {member.node: member for member in self.group.members}
        self._types: dict[Any, Any] = {}
        for member in self.group.members:
            self._types.update(member.operand_types)
        self.builder.rounds = self.group.rounds

    def compute(self, member: Candidate) -> None:
        """Compute a member in its place."""
        self._results(member, self.axes.place(self.group.results[member.node][0]))

    def at(self, operand: Any, index: Sequence[Index]) -> Ref:
        """Return an operand's element, computed, or else loaded where the guard holds."""
        position = 0
        while isinstance(operand, fx.Node) and operand in self.group.aliases:
            source = self.group.aliases[operand]
            if isinstance(type_of(source), tuple) and source not in self.group.aliases:
                operand, position = source, position_taken(operand) or 0
                break
            if operand not in self.views:
                self.views[operand] = view_map(operand)
            view = self.views[operand]
            operand, index = view.source, view.index(index, self.sizes)
        if isinstance(operand, fx.Node) and operand in self._members:
            member = self._members[operand]
            if isinstance(member.entry, ReductionOp):
                return self._of_row(member, position, index)
            return self._results(member, index)[position]
        return self._load(operand, index)

    def shape_of(self, operand: Any) -> tuple[int, ...]:
        """Return an operand's shape."""
        return tuple(self._type(operand).shape)

    def _type(self, operand: Operand) -> Any:
        """Return the type of an operand of a member."""
        known = self._types.get(operand)
        if known is None and isinstance(operand, fx.Node):
            known = self._types[operand] = type_of(operand)
        return known

    def _of_row(self, member: Candidate, position: int, index: Sequence[Index]) -> Ref:
        """Return an element of a result that is known only row by row."""
        places = self.group.results.get(member.node)
        if places is None:
            raise Unfusable("it reads what was reduced, or scaled by it, in another row")
        place = self.axes.place(places[position])
        value = self._results(member, place)[position]
        if place == tuple(index):
            return value
        reduced = set(self.axes.of(self.group.space.reduced or ()))
        axes = moved_axes(place, index, reduced, self.sizes)
        return Moved(self, axes).value(value)

    def _results(self, member: Candidate, index: Sequence[Index]) -> tuple[Ref, ...]:
        guard = None if self.guard is None else self.guard.position
        is_row = isinstance(member.entry, ReductionOp)
        key = member.node if is_row else (member.node, tuple(index), guard)
        if key in self.values:
            return self.values[key]
        before = self.guard
        if isinstance(member.entry, ReductionOp):
            self.guard = None
            values = self._reduction(member, member.entry)
        elif isinstance(member.entry, MoveOp):
            values = (self._moved(member, member.entry, index),)
        else:
            found = self._scalar(member, member.entry, index)
            values = found if isinstance(found, tuple) else (found,)
        self.guard = before
        # A conversion that the program asks for takes place, whatever else is left unrounded.
        convert = self.builder.stored if self._is_conversion(member) else self.builder.cast
        typed = zip(values, member.types, strict=True)
        self.values[key] = tuple(convert(value, known.dtype) for value, known in typed)
        return self.values[key]

    def _is_conversion(self, member: Candidate) -> bool:
        """Tell whether a member's result has a dtype that none of its operands has."""
        dtypes = {known.dtype for known in member.operand_types.values()}
        return member.type.dtype not in dtypes

    def _moved(self, member: Candidate, entry: MoveOp, index: Sequence[Index]) -> Ref:
        value = entry.build(
            self._point(member, index), *member.operands.values(), **member.attributes
        )
        for operand in member.tensors:  # eager needs those too whose elements are not
            if operand not in self._members and operand not in self.group.aliases:
                self._input(operand)
        return value

    def _scalar(self, member: Candidate, entry: ScalarOp, index: Sequence[Index]) -> Any:
        dtype = self._compute_dtype(member, entry)
        operands = [
            self._converted(name, value, entry, dtype, index)
            for name, value in member.operands.items()
        ]
        attributes = member.attributes
        if "result_dtype" in entry.attributes:
            attributes["result_dtype"] = member.type.dtype
        if "common_dtype" in entry.attributes:
            values = member.operands.values()
            attributes["common_dtype"] = common_dtype(self._meta(value) for value in values)
        if entry.checks:
            attributes["require"] = self._point(member, index).require
        return entry.build(*operands, **attributes)

    def _point(self, member: Candidate, index: Sequence[Index]) -> EmittedPoint:
        return EmittedPoint(self, index, tuple(member.type.shape), member.type.dtype)

    def _compute_dtype(self, member: Candidate, entry: ScalarOp) -> torch.dtype | None:
        if entry.computes is Computes.RESULT:
            return member.type.dtype
        if entry.computes is Computes.BOOL:
            return torch.bool
        if entry.computes in (Computes.OWN, Computes.KINDS):
            return None
        return common_dtype(map(self._meta, member.operands.values()))

    def _meta(self, value: Any) -> Any:
        """Return a tensor without memory that promotes as the operand does."""
        if not isinstance(value, (fx.Node, Attribute)):
            return value
        known = self._type(value)
        return torch.empty((1,) * len(known.shape), dtype=known.dtype, device="meta")

    def _converted(
        self,
        name: str,
        value: Any,
        entry: ScalarOp,
        dtype: torch.dtype | None,
        index: Sequence[Index],
    ) -> Ref | Number | None:
        """Return an operand in the dtype that the operator computes in."""
        if value is None:
            return None
        if not isinstance(value, (fx.Node, Attribute)):
            if entry.computes is Computes.KINDS:
                return value
            is_kept = not self.builder.rounds and entry.name in _SUMS
            return self._number(value, dtype, is_kept or name in entry.exact_numbers)
        if only_type_matters(entry, name):
            if value not in self._members and value not in self.group.aliases:
                self._input(value)
            return None
        read = self._broadcast(value, index)
        if dtype is None or name in ("condition", "mask"):
            return read
        # Eager takes a single number out of its tensor as it is, and rounds the result alone.
        is_number = name == "other" and entry.exact_single and self._is_single(value)
        return read.cast(register_of(dtype) if is_number else dtype)

    def _is_single(self, operand: Operand) -> bool:
        return all(isinstance(size, int) and size == 1 for size in self.shape_of(operand))

    def _number(self, value: Any, dtype: torch.dtype | None, exact: bool) -> Ref:
        if dtype is None:
            raise Unfusable("it takes a number where a tensor is expected")
        return self.builder.const(value, register_of(dtype) if exact else dtype)

    def _over_own_domain(self, member: Candidate, entry: ReductionOp) -> tuple[Ref, ...]:
        """Compute an operator that indexes its operands over an iteration domain of its own."""
        domain = domain_of(member)
        index = self.axes.place(self.group.space.identity)
        point = EmittedPoint(self, index, domain.sizes, member.type.dtype)
        attributes = {name: member.attributes.get(name) for name in entry.attributes}
        result = entry.build(point, *member.operands.values(), **attributes)
        return result if isinstance(result, tuple) else (result,)

    def _reduction(self, member: Candidate, entry: ReductionOp) -> tuple[Ref, ...]:
        if entry.domain is not None:
            return self._over_own_domain(member, entry)
        group = self.group
        shape = row_shape(member)
        coordinates = row_coordinates(member, group.space, group.placed)
        dtypes = [member.operand_types[t].dtype for t in member.tensors]
        dtype = entry.input_dtype(member.call.arguments, dtypes)
        lies = row_dims(member)
        operands: list[Ref | None] = []
        for name, value in member.operands.items():
            if name in lies:
                read = self._broadcast(value, self.axes.place([coordinates[d] for d in lies[name]]))
                operands.append(read.cast(dtype))
            else:
                operands.append(None if value is None else self.builder.const(value, dtype))
        dims = entry.axes(member.call.arguments, len(shape))
        count = math.prod(shape[d] for d in dims)
        given = {"count": count, "sizes": shape, "result_dtype": member.type.dtype}
        attributes = member.attributes | given
        if "require" in entry.attributes:
            attributes["require"] = self._point(member, ()).require
        if "place" in entry.attributes:
            attributes["place"] = self._number_in_row([coordinates[d] for d in dims])
        result = entry.build(*operands, **{name: attributes.get(name) for name in entry.attributes})
        return result if isinstance(result, tuple) else (result,)

    def _number_in_row(self, coordinates: Sequence[int | None]) -> Ref:
        """Return the number of an element within its row, counted through dimensions in order."""
        number = self.axes.number(coordinates)
        return self.builder.index(number.strides(len(self.sizes)), number.offset)

    def _broadcast(self, operand: Operand, index: Sequence[Index]) -> Ref:
        """Return the element of an operand that is aligned with an index from the right."""
        shape = self.shape_of(operand)
        lead = len(index) - len(shape)
        aligned = index[lead:] if lead >= 0 else (Index(),) * -lead + tuple(index)
        both = zip(aligned, shape, strict=True)
        return self.at(operand, tuple(i if size != 1 else Index() for i, size in both))

    def _load(self, operand: Operand, index: Sequence[Index]) -> Ref:
        known = self._type(operand)
        return self.load(self._input(operand), self._address(known, index), known.dtype)

    def load(self, buffer: int, address: Index, dtype: torch.dtype) -> Ref:
        """Read memory at an address, where the guard holds if it is not read there anyway."""
        access = Access(
            buffer,
            address.strides(len(self.sizes)),
            address.offset,
            tuple(scale for _, scale in address.values),
        )
        places = tuple(value for value, _ in address.values)
        is_anyway = Instruction("load", places, register_of(dtype), access) in self.builder
        indices = [Ref(self.builder, value) for value in places]
        return self.builder.load(access, dtype, indices, None if is_anyway else self.guard)

    def _input(self, operand: Operand) -> int:
        """Return the buffer of a tensor from outside."""
        if operand not in self.inputs:
            known = self._type(operand)
            self.inputs[operand] = len(self.buffers)
            self.buffers.append(Buffer(f"in{len(self.inputs) - 1}", known.dtype, False))
        return self.inputs[operand]

    def _address(self, known: TensorType, index: Sequence[Index]) -> Index:
        address = Index()
        for one, stride in zip(index, known.stride or (), strict=True):
            address = address + one * stride
        return address

    def stored(self, node: fx.Node, position: int) -> Ref:
        """Return a result as it is written, or what is summed to it."""
        if node not in self.group.results:
            raise Unfusable("it is used outside, but has no place in the region")
        member = self._members[node]
        if node in self.group.sums:
            return self._summand(member)
        index = self.axes.place(self.group.results[node][position])
        value = self._results(member, index)[position]
        return self.builder.stored(value, result_type(node, position).dtype)

    def store(self, node: fx.Node, position: int, value: Ref) -> Store:
        """Write a result to a buffer of its own, behind those of all inputs: calls pass them so."""
        known = result_type(node, position)
        buffer = len(self.buffers)
        self.buffers.append(Buffer(f"out{buffer - len(self.inputs)}", known.dtype, True))
        address = self._address(known, self.axes.place(self.group.results[node][position]))
        access = Access(buffer, address.strides(len(self.sizes)))
        return Store(access, value.position, is_sum=node in self.group.sums)

    def _summand(self, member: Candidate) -> Ref:
        """Return what a member that sums over all rows sums."""
        group, (operand,) = self.group, member.tensors
        coordinates = row_coordinates(member, group.space, group.placed)
        read = self._broadcast(operand, self.axes.place(coordinates))
        return read.cast(sum_dtype_of(member))


def common_dtype(values: Iterable[Any]) -> torch.dtype:
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


def result_type(node: fx.Node, position: int) -> TensorType:
    """Return the type of one of a node's results."""
    known = type_of(node)
    return known[position] if isinstance(known, tuple) else known
