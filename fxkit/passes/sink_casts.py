"""Move casts behind operators that only move numbers about, so that they cancel."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.layout.sinking import Sinker, SinkRegion
from fxkit.patterns.rules.casts import holds_all
from fxkit.torch_adapters.operators import OpOverload


@dataclass(frozen=True)
class SinkCasts(Pass):
    """Move numbers about in their narrow dtype where they were widened for it and narrowed again.

    A cast to a dtype that holds every number of the one before goes behind views, transposes,
    joins, selections and copies, and is taken out with the cast that brings the old dtype back.
    Other uses get a cast of their own; nothing is done where that makes as many new casts. Nobody
    can tell: nothing that is written to is touched, and the caller gets no tensor that shares
    memory where he got two. Where autograd follows, gradients are added up in the wide dtype, and
    the casts stay.

    Rewrites:
        %w = aten.to(%x, f32); %t = aten.transpose(%w, 0, 1); return aten.add(aten.to(%t, bf16), 1)
            →  %t = aten.transpose(%x, 0, 1); return aten.add(%t, 1)
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the casts in order. Cost: linear in the edges for each pair of dtypes."""
        _CastSinker(edit, context, "sink_casts").run()


_CASTS = frozenset(["aten.to", "aten._to_copy", "prims.convert_element_type"])

# Operators that give numbers of their first operand, or of their list of operands, unchanged.
_MOVES = frozenset(
    f"aten.{name}"
    for name in """
    view reshape flatten unflatten transpose permute t numpy_T movedim unsqueeze squeeze expand
    narrow slice select flip roll repeat tile contiguous clone cat stack index_select gather
    repeat_interleave diagonal alias view_as reshape_as expand_as
    """.split()
)


class _CastSinker(Sinker):
    def moved(self, node: fx.Node) -> tuple[fx.Node, Hashable] | None:
        call = resolve(node)
        if call is None or call.name not in _CASTS:
            return None
        operand = call.arguments.get("self")
        known = type_of(operand) if isinstance(operand, fx.Node) else None
        made = type_of(node)
        if not isinstance(known, TensorType) or not isinstance(made, TensorType):
            return None
        assert isinstance(operand, fx.Node)
        if known.dtype == made.dtype or known.device != made.device or not _only_casts(call):
            return None
        return operand, (known.dtype, made.dtype)

    def undoes(self, node: fx.Node, key: Hashable) -> bool:
        found = self.moved(node)
        return found is not None and found[1] == (_dtypes(key)[1], _dtypes(key)[0])

    def carries(self, node: fx.Node, key: Hashable) -> bool:
        call = resolve(node)
        narrow, wide = _dtypes(key)
        if call is None or not effects_of(node).is_pure:
            return False
        if call.name not in _MOVES and call.name != "python.getitem":
            return False
        known = type_of(node)
        return isinstance(known, TensorType) and known.dtype == wide and holds_all(wide, narrow)

    def is_neutral(self, operand: fx.Node, user: fx.Node, key: Hashable) -> bool:
        call = resolve(user)
        assert call is not None
        names = ("index", "other", "repeats", "size", "shape")
        is_aside = any(call.arguments.get(name) is operand for name in names)
        return is_aside or not isinstance(type_of(operand), (TensorType, type(None)))

    def unmove(self, operand: fx.Node, user: fx.Node, key: Hashable) -> fx.Node | None:
        return None

    def move(self, value: fx.Node, key: Hashable, place: fx.Node) -> fx.Node:
        dtype = _dtypes(key)[1]
        if isinstance(place.target, OpOverload):
            options = {"dtype": dtype}
            cast = torch.ops.aten._to_copy.default
            return self.edit.insert("call_function", cast, (value,), options, before=place)
        return self.edit.insert("call_method", "to", (value, dtype), before=place)

    def objection(self, region: SinkRegion) -> str | None:
        for entry, source in region.entries.items():
            known = type_of(source)
            if isinstance(known, TensorType) and known.requires_grad:
                return "gradients would be added up in the narrow dtype"
            if self.sharing.is_written(source) or self.sharing.is_written(entry):
                return f"%{source.name} is written to"
        for node in region.exits:
            if self._reaches_caller(node):
                return f"the caller could see that %{node.name} and an operand became one tensor"
        return None

    def _reaches_caller(self, node: fx.Node) -> bool:
        """Tell whether a cast's new memory, or a view of it, leaves the graph.

        Alias sets can't tell: for them a cast may always be its operand itself.
        """
        stack, seen = [node], {node}
        while stack:
            value = stack.pop()
            for user in value.users:
                if user.op == "output":
                    return True
                is_view = value in effects_of(user).aliases and self.moved(user) is None
                if is_view and user not in seen:
                    seen.add(user)
                    stack.append(user)
        return False


def _dtypes(key: Hashable) -> tuple[torch.dtype, torch.dtype]:
    assert isinstance(key, tuple)
    return key


def _only_casts(call: Call) -> bool:
    arguments: Any = call.arguments
    kept = (None, False, torch.preserve_format, torch.strided)
    names = ("copy", "memory_format", "layout", "pin_memory")
    return all(any(arguments.get(name) is value for value in kept) for name in names)
