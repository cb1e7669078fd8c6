"""A point of an operator's result, through which rows that move elements read their operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from fxkit.ir.op import Attribute
from fxkit.lower.fusion.view_map import shown, viewed
from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.index import Index, numbered
from fxkit.lower.loop_ir.loop_ir import Unfusable


class Reader(Protocol):
    """What a point needs of an emitter.

    Attributes:
        builder: The body under construction.
        sizes: Size of each axis.
        guard: Where memory may be touched; None for everywhere.
    """

    builder: Builder
    sizes: list[int]
    guard: Ref | None

    def at(self, operand: Any, index: Sequence[Index]) -> Ref:
        """Return an operand's element."""
        ...

    def shape_of(self, operand: Any) -> tuple[int, ...]:
        """Return an operand's shape."""
        ...


class EmittedPoint:
    """A point whose reads become instructions; see `movement_table.Point`."""

    def __init__(
        self, reader: Reader, index: Sequence[Index], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.index = tuple(index)
        self.shape = shape
        self.dtype = dtype
        self._reader = reader

    def shape_of(self, operand: Any) -> tuple[int, ...]:
        return self._reader.shape_of(operand)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, (fx.Node, Attribute))

    def read(self, operand: Any, index: Sequence[Index]) -> Ref:
        return self._reader.at(operand, tuple(index)).cast(self.dtype)

    def read_own(self, operand: Any, index: Sequence[Index]) -> Ref:
        return self._reader.at(operand, tuple(index))

    def number(self, value: Number) -> Ref:
        if not isinstance(value, (bool, int, float)):
            raise Unfusable(f"it takes {type(value).__name__} for a number")
        return self._reader.builder.const(value, self.dtype)

    def value(self, index: Index) -> Ref:
        builder = self._reader.builder
        total: Ref | None = None
        if index.axes or not index.values:
            total = builder.index(index.strides(len(self._reader.sizes)), index.offset)
        for position, scale in index.values:
            term = Ref(builder, position) * scale if scale != 1 else Ref(builder, position)
            total = term if total is None else total + term
        if total is None:
            raise ValueError("expected an index of axes or values, got neither")
        return total + index.offset if not index.axes and index.offset and index.values else total

    def place(self, value: Ref) -> Index:
        return Index(values=((value.position, 1),))

    def require(self, condition: Ref) -> None:
        guard = self._reader.guard
        held = self._reader.builder.check(condition if guard is None else condition | ~guard)
        self._reader.guard = held if guard is None else guard & held

    def below(self, index: Index, bound: int) -> Ref | bool:
        found = index.bounds(self._reader.sizes)
        if found is not None and found[1] < bound:
            return True
        if found is not None and found[0] >= bound:
            return False
        if found is None or max(-found[0], found[1], abs(bound)) >= 2**31:
            return self.value(index) < bound
        strides = index.strides(len(self._reader.sizes))
        # Vectors hold twice as many numbers of 32 bits.
        return self._reader.builder.index(strides, index.offset, torch.int32) < bound

    def where(
        self, condition: Ref | bool, then: Callable[[], Ref], otherwise: Callable[[], Ref]
    ) -> Ref:
        if isinstance(condition, bool):
            return then() if condition else otherwise()
        chosen = self._under(condition, then)
        other = self._under(~condition, otherwise)
        builder = self._reader.builder
        return builder.scalar("select", condition, chosen, other, dtype=chosen.dtype)

    def _under(self, condition: Ref, read: Callable[[], Ref]) -> Ref:
        guard = self._reader.guard
        self._reader.guard = condition if guard is None else guard & condition
        try:
            return read()
        finally:
            self._reader.guard = guard

    def shown(
        self, view: Callable[..., torch.Tensor], operand: Any, arguments: Mapping[str, Any]
    ) -> tuple[Index, ...]:
        shape = self.shape_of(operand)
        meta_operand = torch.empty(shape, device="meta")
        strides, offset = shown(meta_operand, view(meta_operand, **arguments))
        return viewed(self.index, self.shape, strides, offset, shape, self._reader.sizes)

    def divided(self, index: Index, by: int) -> tuple[Index, Index]:
        return index.divided(by, self._reader.sizes)

    def numbered(self, number: Index, shape: Sequence[int]) -> tuple[Index, ...]:
        return numbered(number, shape, self._reader.sizes)
