"""Values of a row that are read at another place of it: a norm whose result is turned or rolled.

What is reduced is the same for all of a row. So a value that is made of it and of what is loaded
along the row is made again, from the same sums, of what is loaded at the other place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.index import Index
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Instruction, Unfusable


class Loader(Protocol):
    """What moving needs of an emitter; see there.

    Attributes:
        builder: The body under construction.
        sizes: Size of each axis.
        buffers: The memory that is read.
        guard: Where memory may be touched; None for everywhere.
    """

    builder: Builder
    sizes: list[int]
    buffers: list[Buffer]
    guard: Ref | None

    def load(self, buffer: int, address: Index, dtype: torch.dtype) -> Ref:
        """Read memory at an address."""
        ...


def moved_axes(
    place: Sequence[Index], index: Sequence[Index], reduced: Collection[int], sizes: Sequence[int]
) -> dict[int, Index]:
    """Return where along each axis a value is read, for the axes along which that is elsewhere.

    Args:
        place: Where the value lies.
        index: Where it is read.
        reduced: The axes that form the row.
        sizes: Size of each axis.

    Raises:
        Unfusable: When it is read in another row.
    """
    moved: dict[int, Index] = {}
    for lies, read in zip(place, index, strict=True):
        if lies == read:
            continue
        if len(lies.axes) != 1 or lies.axes[0][1] != 1 or lies.axes[0][0] not in reduced:
            raise Unfusable("it reads what was reduced, or scaled by it, in another row")
        if read.values:
            raise Unfusable("it reads what was scaled by a reduction at places that are computed")
        moved[lies.axes[0][0]] = read
    return moved


@dataclass
class Moved:
    """Makes values of a row once more, at another place of it.

    Attributes:
        loader: The emitter of the body.
        axes: Where along each axis, for those along which it is another place.
    """

    loader: Loader
    axes: Mapping[int, Index]
    _made: dict[int, int] = field(default_factory=dict)

    def value(self, value: Ref) -> Ref:
        """Return what a value is at the other place.

        Raises:
            Unfusable: When it depends on more than what is loaded there and what was reduced.
        """
        return Ref(self.loader.builder, self._again(value.position))

    def _again(self, position: int) -> int:
        if position not in self._made:
            self._made[position] = self._made_of(self.loader.builder.body[position])
        return self._made[position]

    def _made_of(self, instruction: Instruction) -> int:
        builder = self.loader.builder
        if instruction.is_scan or instruction.is_tensor_op or instruction.op == "check":
            raise Unfusable("it reads elsewhere what depends on all that lies before it in its row")
        if instruction.is_reduction:
            return builder.append(instruction).position
        if instruction.op == "load":
            return self._loaded(instruction).position
        if instruction.op == "index":
            address = self._address(instruction.detail)
            strides = address.strides(len(self.loader.sizes))
            return builder.index(strides, address.offset, instruction.dtype).position
        operands = tuple(map(self._again, instruction.operands))
        return builder.again(instruction, operands).position

    def _loaded(self, load: Instruction) -> Ref:
        loader, before = self.loader, self.loader.guard
        values = [self._again(o) for o in load.indices]
        address = self._address(load.detail)
        for value, scale in zip(values, load.detail.scales, strict=True):
            address = address + Index(values=((value, scale),))
        if load.guard is not None:
            if load.detail.otherwise.value != 0:
                raise Unfusable("it reads elsewhere what is not loaded everywhere")
            guard = Ref(loader.builder, self._again(load.guard))
            loader.guard = guard if before is None else before & guard
        found = loader.load(load.detail.buffer, address, self._dtype(load))
        loader.guard = before
        return found

    def _dtype(self, load: Instruction) -> torch.dtype:
        return self.loader.buffers[load.detail.buffer].dtype

    def _address(self, access: Access) -> Index:
        address = Index(offset=access.offset)
        for axis, stride in enumerate(access.strides):
            place = self.axes.get(axis, Index.along({axis: 1}))
            address = address + place * stride
        return address
