"""Operands that are views of dequantised integers, for which views of the integers stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.quantized_operands import integers_of
from fxkit.lower.compiling.token_scales import FLOATS, aten, is_float

# What unsigned bytes are less as signed ones.
TO_SIGNED = 128

_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "transpose", "permute", "t", "mT", "movedim", "view", "reshape", "flatten", "unflatten",
        "expand", "unsqueeze", "squeeze", "select", "slice", "narrow", "alias", "detach",
        "contiguous", "clone",
    )
)  # fmt: skip
"""Operators that move the numbers of one tensor, whatever these are."""


@dataclass(frozen=True)
class MovedIntegers:
    """An operand that was dequantised with one scale, and views of it that lie between.

    Attributes:
        value: The operand.
        moves: What moves the numbers of its source, last one first.
        source: What they begin with.
        integers: What that was dequantised from.
        scale: Its scale.
        zero: Its zero point.
    """

    value: fx.Node
    moves: tuple[fx.Node, ...]
    source: fx.Node
    integers: fx.Node
    scale: float
    zero: int

    @classmethod
    def of(cls, value: Any) -> MovedIntegers | None:
        """Return what an operand is made of; None where it is nothing of the kind."""
        moves: list[fx.Node] = []
        source = value
        while isinstance(source, fx.Node):
            factor = integers_of(source, FLOATS)
            if factor is not None:
                scale, zero = factor.scale, factor.zero
                assert isinstance(scale, float) and isinstance(zero, int)
                return cls(value, tuple(moves), source, factor.node, scale, zero)
            call = resolve(source)
            if call is None or call.name not in _MOVES or not is_float(source, FLOATS):
                return None
            moves.append(source)
            (source,) = source.all_input_nodes[:1]
            if dtype_of(source) != dtype_of(moves[-1]):  # it looks at bits, or rounds
                return None
        return None

    def rows(self, edit: EditSession, before: fx.Node) -> fx.Node:
        """Return the integers, moved; those of a row lie side by side."""
        rows = self._moved(edit, before, self.integers)
        known = type_of(rows)
        if isinstance(known, TensorType) and known.stride is not None and known.stride[-1] == 1:
            return rows
        return add_call(edit, before, aten.contiguous.default, rows)

    def signed(self, edit: EditSession, before: fx.Node) -> tuple[fx.Node, int]:
        """Return the integers as signed bytes, moved, and their zero point."""
        known = type_of(self.integers)
        if isinstance(known, TensorType) and known.dtype != torch.uint8:
            return self._moved(edit, before, self.integers), self.zero
        integers = signed_bytes(edit, before, self.integers)
        return self._moved(edit, before, integers), self.zero - TO_SIGNED

    def _moved(self, edit: EditSession, before: fx.Node, integers: fx.Node) -> fx.Node:
        moved = {self.source: integers}

        def of(node: fx.Node) -> fx.Node:
            return moved.get(node, node)

        for move in reversed(self.moves):
            args, kwargs = map_arg(move.args, of), map_arg(move.kwargs, of)
            made = edit.insert(move.op, move.target, args, kwargs, before=before)
            infer_type(made)
            moved[move] = made
        return moved[self.value]


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a tensor, if it is known."""
    known = type_of(node)
    return known.dtype if isinstance(known, TensorType) else None


def signed_bytes(edit: EditSession, before: fx.Node, integers: fx.Node) -> fx.Node:
    """Return unsigned bytes, each less `TO_SIGNED`, as signed ones."""
    wide = add_call(edit, before, aten.to.dtype, integers, torch.int16)
    wide = add_call(edit, before, aten.sub.Tensor, wide, TO_SIGNED)
    return add_call(edit, before, aten.to.dtype, wide, torch.int8)


def add_call(edit: EditSession, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call right before a node, and find its type."""
    made = edit.call(target, *args, before=before, **kwargs)
    infer_type(made)
    return made
